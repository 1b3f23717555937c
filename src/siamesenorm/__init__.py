"""siamesenorm: residual topologies for Transformers.

from siamesenorm import Residual
residual = Residual("siamese", dim=512, blocks=12)
hidden = residual(embedding, sublayers)

model, tokenizer = siamesenorm.load("runs/lm-tiny")    # or a Hugging Face folder, or a GGUF file
siamesenorm.compare(make_model, tokens, topologies=["pre", "siamese"]).verdict
"""

from typing import TYPE_CHECKING, Any

from siamesenorm.version import __version__

if TYPE_CHECKING:
    from siamesenorm.lab.comparison import compare
    from siamesenorm.lab.inspection.looking import inspect
    from siamesenorm.lab.recording import record
    from siamesenorm.lab.report.outcome import report
    from siamesenorm.opening import load
    from siamesenorm.residual import Residual, Topology, TopologyError
    from siamesenorm.train.session import train_recipe as train

__all__ = [
    "Residual",
    "Topology",
    "TopologyError",
    "__version__",
    "compare",
    "inspect",
    "load",
    "record",
    "report",
    "train",
]

_HOMES = {
    "Residual": "siamesenorm.residual",
    "Topology": "siamesenorm.residual",
    "TopologyError": "siamesenorm.residual",
    "compare": "siamesenorm.lab.comparison",
    "inspect": "siamesenorm.lab.inspection.looking",
    "load": "siamesenorm.opening",
    "record": "siamesenorm.lab.recording",
    "report": "siamesenorm.lab.report.outcome",
}
"""Where names come from."""
_PACKAGES = ("residual", "train")


def __getattr__(name: str) -> Any:
    """Import the library at the first use of one of its names: torch takes seconds, `siamesenorm --help` should not."""
    if name not in _HOMES and name not in _PACKAGES:
        raise AttributeError(f"module 'siamesenorm' has no attribute {name!r}")
    import importlib

    if name in _PACKAGES:
        return importlib.import_module(f"siamesenorm.{name}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__, *_PACKAGES})
