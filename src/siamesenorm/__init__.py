"""siamesenorm: residual topologies for Transformers.

from siamesenorm import Residual
residual = Residual("siamese", dim=512, blocks=12)
hidden = residual(embedding, sublayers)

model, tokenizer = siamesenorm.load("runs/lm-tiny")    # or a Hugging Face folder, or a GGUF file
"""

from typing import TYPE_CHECKING, Any

from siamesenorm.version import __version__

if TYPE_CHECKING:
    from siamesenorm.opening import load
    from siamesenorm.residual import Residual, Topology, TopologyError

__all__ = ["Residual", "Topology", "TopologyError", "__version__", "load"]


def __getattr__(name: str) -> Any:
    """Import the library at the first use of one of its names: torch takes seconds, `siamesenorm --help` should not."""
    if name != "residual" and name not in __all__:
        raise AttributeError(f"module 'siamesenorm' has no attribute {name!r}")
    import importlib

    if name == "load":
        return importlib.import_module("siamesenorm.opening").load
    residual = importlib.import_module("siamesenorm.residual")
    return residual if name == "residual" else getattr(residual, name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, "residual"})
