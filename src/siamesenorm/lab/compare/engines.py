"""Engines: where the cells of a grid run, by name."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

from siamesenorm.data.workers import available_cores
from siamesenorm.errors import ConfigError
from siamesenorm.lab.compare.runner import CellProgress, GridWatcher, LocalEngine
from siamesenorm.train.provenance import threads_asked_for

ENGINES = ("local", "ray")


class CellEngine(Protocol):
    """Where cells run."""

    jobs: int

    def run(self, plan: Sequence[CellProgress], provenance: dict[str, Any], watcher: GridWatcher) -> bool:
        """Run what is not done yet; False if it was interrupted."""


def check_engine(name: str) -> None:
    """Raise if there is no such engine, or not what it needs."""
    if name not in ENGINES:
        raise ConfigError.unknown("--engine", name, ENGINES)
    if name == "ray":
        from siamesenorm.lab.compare.ray_engine import check_ray

        check_ray()


def open_engine(name: str, jobs: int | None = None, model: str | None = None) -> CellEngine:
    """The engine of a name; model: ``FILE.py:NAME`` of a user's own model."""
    check_engine(name)
    if model is not None and name != "local":
        raise ConfigError.not_allowed("--engine", name, "local", "for a model of your own")
    if name == "local":
        return local_engine(jobs, model)
    from siamesenorm.lab.compare.ray_engine import RayEngine

    return RayEngine(jobs)


def local_engine(jobs: int | None = None, model: str | None = None) -> LocalEngine:
    """As many processes as asked for, or one per core (a few cores where OMP_NUM_THREADS says so), or one per GPU."""
    import torch

    gpus = torch.cuda.device_count()
    return LocalEngine(jobs or gpus or max(1, available_cores() // (threads_asked_for() or 1)), gpus=gpus, model=model)
