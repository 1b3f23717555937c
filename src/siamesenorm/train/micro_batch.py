"""Micro-batches: how a process's share of a batch is computed in parts, as accumulated gradients of the whole batch.

A batch of B samples goes to W processes in shares that differ by one sample at most. A share is computed
``train.micro_batch_size`` samples at a time, in as many parts as the largest share takes: sharded models take all
processes for a pass. Every part counts by its samples, so that the gradient is that of the whole batch, whatever W.
"""

from __future__ import annotations

from siamesenorm.errors import ConfigError
from siamesenorm.tasks import Task
from siamesenorm.tasks.base import Batch
from siamesenorm.train.config import RunConfig
from siamesenorm.train.distributed import World
from siamesenorm.train.memory import AMPLE, Room, free_memory, least_memory, memory_need, sharing
from siamesenorm.train.parallel.pipeline import takes

FILLED = 0.9
"""Share of the free memory that ``auto`` fills, as `siamesenorm.train.planning` counts."""


class MicroBatches:
    """How a process computes its share of every batch: ``size`` samples at a time, in ``count`` parts.

    All processes make one, together.
    """

    def __init__(self, config: RunConfig, task: Task, world: World) -> None:
        batch, processes = config.train.batch_size, world.data_size
        if batch < processes:
            raise ConfigError.refused("train.batch_size", batch, f"{processes} processes take {processes} or more")
        self.share = -(-batch // processes)
        """Samples of a step that the first process has; others have as many or one less."""
        self.rows = batch // processes + (world.data_rank < batch % processes)
        """Samples of a step that this process has."""
        wish = config.train.micro_batch_size
        if wish == "auto":
            self.size = min(world.gather(world.agree(lambda: self._as_fits(config, task, world))))
        else:
            self.size = self.share if wish is None else min(wish, self.share)
        self.count = -(-self.share // self.size)
        if task.mixes_pairs and (batch % (2 * processes) or self.size % 2):
            several = f"{processes} process{'es' * (processes > 1)} with parts of {self.size}"
            raise ConfigError.refused(
                "train.batch_size",
                batch,
                f"samples are mixed in pairs, and {several} take multiples of {2 * processes} in even parts",
            )

    def _as_fits(self, config: RunConfig, task: Task, world: World) -> int:
        """As many samples as are estimated to fit, in equal parts where these are not much smaller."""
        room, least = free_memory(world.device, sharing(world)), 2 if task.mixes_pairs else 1
        if world.pp > 1:
            return self._as_pipeline_takes(config, task, world, room)
        fits = self.share
        if room is None or AMPLE * sum(least_memory(config, task, world, fits)) < room.size:
            return fits
        while fits > least and sum(memory_need(config, task, world, fits)) > FILLED * room.size:
            fits = max(least, fits // 2 // least * least)
        equal = max(size for size in range(1, fits + 1) if self.share % size == 0)
        return equal if equal % least == 0 and 2 * equal > fits else fits

    def _as_pipeline_takes(self, config: RunConfig, task: Task, world: World, room: Room | None) -> int:
        """The largest equal parts that fit and that the schedule takes, those that need least where none fits.

        GPipe holds all parts of a batch at once: its smallest are not those that need least.
        """
        equal = [size for size in range(self.share, 0, -1) if self.share % size == 0]
        taken = [size for size in equal if takes(config.parallel.schedule, world.pp, self.share // size)]
        needs: dict[int, float] = {}
        for size in taken:
            needs[size] = 0.0 if room is None else sum(memory_need(config, task, world, size))
            if room is None or needs[size] <= FILLED * room.size:
                return size
        return min(needs, key=needs.__getitem__, default=1)

    def split(self, batch: Batch) -> tuple[list[Batch], list[int]]:
        """A batch of this process in its parts, and how many samples of each count.

        A process that has a sample less than others, and so a part too few, computes its first sample once more, of
        which nothing counts: sharded models take all processes for a pass.
        """
        if self.count == 1:
            return [batch], [self.rows]
        ends = [(first, min(first + self.size, self.rows)) for first in range(0, self.rows, self.size)]
        parts = [{name: values[first:last] for name, values in batch.items()} for first, last in ends]
        idle = self.count - len(parts)
        parts += [{name: values[:1] for name, values in batch.items()}] * idle
        return parts, [last - first for first, last in ends] + [0] * idle

    def sentence(self) -> str:
        """Both numbers, in words."""
        return f"a process computes {self.size} samples at a time, {self.count} times per step"
