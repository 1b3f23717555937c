"""What a run would take, found out by a few steps of it that leave nothing behind."""

from __future__ import annotations

import time
from contextlib import closing
from dataclasses import dataclass

from siamesenorm.tasks import find_task
from siamesenorm.train.config import RunConfig
from siamesenorm.train.display import clock
from siamesenorm.train.distributed import World
from siamesenorm.train.engine import Engine
from siamesenorm.train.memory import check_memory, memory_need
from siamesenorm.train.planning.hardware import gib
from siamesenorm.train.recipes import in_steps

STEPS = 3
"""That are timed, behind a first one that is not."""


@dataclass(frozen=True)
class Estimate:
    """Of one run on this machine."""

    parameters: int
    steps: int
    step_seconds: float
    memory: float
    """Bytes of tensors at the fullest moment of a step."""

    @property
    def seconds(self) -> float:
        """Of all steps, without evaluations and the start."""
        return self.steps * self.step_seconds

    def sentence(self) -> str:
        """All of it."""
        return (
            f"{self.parameters:,} parameters, {self.steps:,} steps of {1000 * self.step_seconds:.3g} ms: about "
            f"{clock(self.seconds)} on this machine without evaluations, and {gib(self.memory)} of memory at least"
        )


def estimate(config: RunConfig) -> Estimate:
    """Take a few steps of a run in memory; bad input raises as it does for the run itself."""
    config = in_steps(config)
    config = config.model_copy(update={"train": config.train.model_copy(update={"compile": False})})
    with closing(World.start(config.parallel)) as world:
        task = find_task(config.task)(config)
        check_memory(config, task, world)
        with closing(Engine(config, task, world)) as engine:
            seconds = _step_seconds(engine)
        count = sum(parameter.numel() for parameter in engine.model.parameters())
        return Estimate(count, config.steps, seconds, sum(memory_need(config, task, world)))


def _step_seconds(engine: Engine) -> float:
    """The fastest of a few: others may have the machine for some of them."""
    found = []
    for step in range(1, min(1 + STEPS, engine.config.steps) + 1):
        began = time.perf_counter()
        engine.compute(step).numbers  # noqa: B018  # waits for the device
        engine.apply(step)
        found.append(time.perf_counter() - began)
    return min(found[1:] or found)
