"""Users' own models in a grid: the recipe that stands for them, and what is asked of them beforehand."""

from __future__ import annotations

import math
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from siamesenorm.errors import ConfigError
from siamesenorm.tasks import OWN, find_task
from siamesenorm.tasks.own import Given, OwnLanguageTask, OwnTask, check_model, given_kind, name_of
from siamesenorm.tasks.own_data import FunctionSource, TokenSource, rows_of
from siamesenorm.train.distributed import World
from siamesenorm.train.engine import Engine
from siamesenorm.train.folder import METRICS, read_metrics

if TYPE_CHECKING:
    from siamesenorm.lab.compare.runner import CellProgress

STEPS, BATCH, LENGTH, LR = 300, 16, 128, 1e-3
"""What is trained where nothing is said."""
CORPUS = "python-docs"
"""What is learnt from where nothing is said."""
CLOSE = 1e-3
"""How far first losses of the same model lie apart, as a share: on another number of threads, or another machine."""


def own_recipe(
    parts: Given,
    source: str = "",
    *,
    steps: int | None = None,
    batch_size: int | None = None,
    sequence_length: int | None = None,
) -> dict[str, Any]:
    """The values of a recipe that trains a given model; its fields can be overridden as those of any other."""
    data: dict[str, Any] = {}
    named = parts.data is None or isinstance(parts.data, (str, Path))
    kind = "tokens" if named else given_kind(parts)
    if kind == "tokens":
        data["sequence_length"] = sequence_length or LENGTH
    if named:
        held_out = None if parts.validation is None else str(parts.validation)
        data |= {"train": CORPUS if parts.data is None else str(parts.data), "validation": held_out}
    elif kind == "tokens":
        data["sha256"] = TokenSource.of_array(parts.data, parts.validation, data["sequence_length"]).sha256
    elif kind == "function":  # which decides itself how large its batches are
        batch_size = rows_of(FunctionSource(parts.data, 1).batch(0, 0, 1))
    steps = STEPS if steps is None else steps
    return {
        "about": f"A model of {source or name_of(parts.make_model)}.",
        "task": (OwnLanguageTask if kind == "tokens" else OwnTask).name,
        "model": {"topology": "pre", "source": source or name_of(parts.make_model)},
        "data": data,
        "optimizer": {"lr": LR},
        "schedule": {"warmup": steps // 20},
        "train": {"steps": steps, "batch_size": BATCH if batch_size is None else batch_size, "compile": False},
        "evaluation": {"every": steps},
        "checkpoint": {"every": None},
        "logging": {"every": max(1, min(10, steps // 50)), "tensorboard": False},
    }


def check_own_models(places: Sequence[CellProgress]) -> None:
    """Raise where a model cannot be trained, or is not the one that has been trained here; models of ours pass."""
    own = [progress for progress in places if progress.cell.config.task in OWN]
    for cell in {progress.cell.topology: progress.cell for progress in own}.values():
        task = find_task(cell.config.task)(cell.config)
        assert isinstance(task, OwnTask)
        check_model(task)
    begun = {progress.cell.topology: progress for progress in own if (progress.folder / METRICS).is_file()}
    for progress in begun.values():
        _check_same(progress)


def _check_same(progress: CellProgress) -> None:
    """Raise if the first loss of a run is not what this model, these data and this loss give."""
    there = next((r["loss"] for r in read_metrics(progress.folder) if r["step"] == 1 and "loss" in r), None)
    if there is None:
        return
    config = progress.cell.config
    world = World.start(config.parallel)
    try:
        engine = Engine(config, find_task(config.task)(config), world)
        try:
            here = engine.compute(1).loss
        finally:
            engine.close()
    finally:
        world.close()
    if not math.isclose(here, there, rel_tol=CLOSE, abs_tol=CLOSE**2):
        raise ConfigError(
            f"folder: {str(progress.folder.parent.parent)!r} holds runs of another model, data or loss, whose first "
            f"loss for {progress.cell.topology!r} is {there:.6g} instead of {here:.6g}; give another folder"
        )
