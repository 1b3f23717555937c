"""Where metrics go beside metrics.jsonl: TensorBoard, Weights & Biases, trackio."""

from __future__ import annotations

import contextlib
import importlib.util
import math
from pathlib import Path
from typing import Any, Protocol

from siamesenorm.data.atomic import write_json
from siamesenorm.data.reading import read_object
from siamesenorm.errors import ConfigError, DataError
from siamesenorm.train.config import LoggingConfig, RunConfig
from siamesenorm.train.folder import TENSORBOARD, WANDB


class Tracker(Protocol):
    """A place for numbers by step."""

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Take the numbers of a step."""

    def close(self) -> None:
        """Bring them to where they belong."""


def check_trackers(config: LoggingConfig) -> None:
    """Raise if a tracker that was asked for is not installed."""
    wanted = {"tensorboard": config.tensorboard is True, "wandb": config.wandb, "trackio": config.trackio}
    for name, asked in wanted.items():
        if asked and importlib.util.find_spec(name) is None:
            raise ConfigError.missing_package(f"logging.{name}:", name, name)


def open_trackers(logging: LoggingConfig, config: RunConfig, folder: Path, step: int) -> list[Tracker]:
    """The trackers of a run that goes on from `step`."""
    trackers: list[Tracker] = []
    wanted = logging.tensorboard
    if wanted or (wanted is None and importlib.util.find_spec("tensorboard") is not None):
        trackers.append(TensorBoard(folder / TENSORBOARD, step))
    if logging.wandb:
        trackers.append(WeightsAndBiases(logging.wandb, config, folder))
    if logging.trackio:
        trackers.append(Trackio(logging.trackio, config, folder, step))
    return trackers


class TensorBoard:
    """Event files beside the run's others; what lies behind the step of a resumed run is dropped from view."""

    def __init__(self, folder: Path, step: int) -> None:
        from torch.utils.tensorboard import SummaryWriter

        self.writer = SummaryWriter(str(folder), purge_step=step + 1 if step else None)

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Scalars only."""
        for name, value in numbers_of(values).items():
            self.writer.add_scalar(name, value, step)

    def close(self) -> None:
        """Flush and close."""
        self.writer.close()


class HostedRun:
    """A run of a service, or of its local stand-in: what has ``log`` and ``finish``."""

    run: Any

    def log(self, step: int, values: dict[str, Any]) -> None:
        """Hand over a step."""
        self.run.log(numbers_of(values), step=step)

    def close(self) -> None:
        """Finish the upload."""
        self.run.finish()


class WeightsAndBiases(HostedRun):
    """A W&B run, the same one again after an interruption."""

    def __init__(self, project: str, config: RunConfig, folder: Path) -> None:
        import wandb

        identity = None
        with contextlib.suppress(DataError, KeyError):
            identity = str(read_object(folder / WANDB, "run")["id"])
        self.run = wandb.init(
            project=project,
            name=folder.name,
            id=identity,
            resume="allow",
            dir=str(folder),
            config=config.as_dict(),
        )
        write_json(folder / WANDB, {"id": self.run.id})


class Trackio(HostedRun):
    """A trackio run, the same one again after an interruption; one that begins anew is another of that name."""

    def __init__(self, project: str, config: RunConfig, folder: Path, step: int) -> None:
        import trackio

        self.run = trackio
        trackio.init(project=project, name=folder.name, config=config.as_dict(), resume="allow" if step else "never")


def numbers_of(values: dict[str, Any]) -> dict[str, float]:
    """The finite numbers among values."""
    numbers = {name: value for name, value in values.items() if isinstance(value, (int, float))}
    return {name: v for name, v in numbers.items() if not isinstance(v, bool) and math.isfinite(v)}
