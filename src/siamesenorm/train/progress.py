"""What a loop writes beside the tensors of a checkpoint, checked when it is read back."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from siamesenorm.data.reading import first_of
from siamesenorm.train.folder import Count
from siamesenorm.train.manifest import CheckpointError


class _Written(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)  # a loss may be no number


class _Monitor(_Written):
    losses: list[float] = Field(default_factory=list)
    spikes: Count = 0
    skipped: Count = 0
    rollbacks: Count = 0


class _Progress(_Written):
    step: Count
    sample: Count
    loss: float | None = None
    seconds: float = 0
    evaluation: dict[str, float | None] = Field(default_factory=dict)
    monitor: _Monitor = _Monitor()
    precision: dict[str, float | None] = Field(default_factory=dict)


def check_progress(progress: dict[str, Any], folder: Path) -> None:
    """Raise where a run could not go on from what a checkpoint says."""
    try:
        _Progress.model_validate(progress)
    except ValidationError as error:
        raise CheckpointError(f"checkpoint: {str(folder)!r} is damaged at {first_of(error)}") from None
