"""Checkpoints of a run that are complete or absent, and that any number of processes can read.

from siamesenorm.train.checkpoint import CheckpointStore
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from siamesenorm.train.checkpoint.store import Checkpoint, CheckpointStore

__all__ = ["Checkpoint", "CheckpointStore"]


def __getattr__(name: str) -> Any:
    """What reads a run's folder needs no store, whose import takes a second."""
    if name not in __all__:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from siamesenorm.train.checkpoint import store

    return getattr(store, name)
