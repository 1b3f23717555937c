"""What is asked of many runs, or of a trained one: comparisons, reports, looking inside.

from siamesenorm.lab import inspect
inspect(model, ids).rms
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from siamesenorm.lab.inspection import Inspection, inspect

__all__ = ["Inspection", "inspect"]


def __getattr__(name: str) -> Any:
    """Import at first use: the command line imports this package long before it needs torch."""
    if name not in __all__:
        raise AttributeError(f"module 'siamesenorm.lab' has no attribute {name!r}")
    import importlib

    return getattr(importlib.import_module("siamesenorm.lab.inspection"), name)
