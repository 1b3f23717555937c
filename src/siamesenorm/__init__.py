"""siamesenorm: residual topologies for Transformers.

from siamesenorm import Residual
residual = Residual("siamese", dim=512, blocks=12)
hidden = residual(embedding, sublayers)
"""

from siamesenorm.residual import Residual, Topology, TopologyError
from siamesenorm.version import __version__

__all__ = ["Residual", "Topology", "TopologyError", "__version__"]
