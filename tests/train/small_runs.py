"""Runs so small that a whole one takes a second or two."""

from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file
from torch import Tensor

from siamesenorm.tasks import find_task
from siamesenorm.train.config import RunConfig
from siamesenorm.train.distributed import World
from siamesenorm.train.engine import Engine
from siamesenorm.train.folder import WEIGHTS, read_metrics
from siamesenorm.train.loop import Loop, train
from siamesenorm.train.recipes import resolve

SMALL = [
    "data.train=python-docs",
    "dim=16",
    "blocks=2",
    "heads=2",
    "ffn_dim=32",
    "sequence_length=16",
    "train.batch_size=4",
    "warmup=3",
    "steps=12",
    "checkpoint.every=null",
    "evaluation.every=null",
    "tensorboard=false",
    "peak_flops=1e12",
]


def tiny(*overrides: str, recipe: str = "lm-tiny") -> RunConfig:
    return resolve(recipe, [*SMALL, *overrides])


def engine(*overrides: str) -> Engine:
    config = tiny(*overrides)
    return Engine(config, find_task(config.task)(config), World())


def losses(folder: Path) -> dict[int, float]:
    """Loss by step; a step that is there twice fails."""
    found: dict[int, float] = {}
    for record in read_metrics(folder):
        if "loss" in record:
            assert record["step"] not in found, f"step {record['step']} is there twice"
            found[record["step"]] = record["loss"]
    return found


def evaluations(folder: Path) -> dict[int, dict[str, Any]]:
    return {record["step"]: record["evaluation"] for record in read_metrics(folder) if "evaluation" in record}


def weights(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / WEIGHTS)


class Killed(BaseException):
    """As sudden as it gets within one process."""


def kill_at(monkeypatch, step: int) -> None:
    """End runs in the middle of a step."""
    plain = Loop.take_step

    def take_step(self):
        if self.step + 1 == step:
            self.engine.compute(step)
            raise Killed
        return plain(self)

    monkeypatch.setattr(Loop, "take_step", take_step)


def train_until(step: int, config: RunConfig, folder: Path) -> None:
    """Train and be killed in the middle of a step."""
    with pytest.MonkeyPatch.context() as patch:
        kill_at(patch, step)
        with pytest.raises(Killed):
            train(config, folder)
