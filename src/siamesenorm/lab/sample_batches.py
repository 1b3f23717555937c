"""The samples of one command, batch by batch, in memory or on the disk, by however many processes."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from siamesenorm.lab.sample_files import open_samples
from siamesenorm.lab.sampling import Decode, Generator
from siamesenorm.models.fingerprint import weights_hash
from siamesenorm.tasks.diffusion.sample_grid import Images
from siamesenorm.tasks.diffusion.sampling import Sampler
from siamesenorm.terminal import progress_bar
from siamesenorm.train.inference import Inference

FRAMES = 10
"""Pictures of a filmstrip, from noise to the sample."""
GRID_BYTES = 2**26
"""Of the images of a grid; of more samples the first ones of each class are shown."""


class SampleBatches:
    """The samples of one call, batch by batch, by however many processes."""

    def __init__(
        self,
        generator: Generator,
        sampler: Sampler,
        decode: Decode,
        labels: NDArray[np.int64],
        seed: int,
        size: int,
        place: Inference,
    ) -> None:
        self.generator, self.sampler, self.decode, self.place = generator, sampler, decode, place
        self.labels, self.seed, self.size = labels, seed, size
        self.weights = weights_hash(generator.model)  # before matrices are cast
        self.report: Callable[[float], None] = lambda images: None

    def batch(self, number: int) -> Images:
        """The images of a batch, which is computed in the same way whoever computes it."""
        first = number * self.size
        labels = self.labels[first : first + self.size].tolist()
        found = self.generator.make(
            labels,
            self.sampler,
            seed=self.seed,
            at_once=self.size,
            first=first,
            progress=lambda step, whole: self.report(len(labels) * step / whole),
        )
        return self.decode(found.images)

    def frames(self, count: int) -> list[Tensor]:
        """How the first samples come about."""
        labels = self.labels[:count].tolist()
        with self.place.autocast():
            return self.generator.make(labels, self.sampler, seed=self.seed, frames=FRAMES, at_once=count).frames

    def in_memory(self) -> Images:
        """All images."""
        batches = range(-(-len(self.labels) // self.size))
        return np.concatenate(list(self._done(batches, self.batch, len)))

    def to_disk(self, target: Path, classes: int, vae: Path | None) -> Images:
        """Write what is not there yet; the first images, as many as a grid shows."""
        names = [self.generator.name(number) for number in range(self.generator.model.config.classes + 1)]
        files, world = open_samples(target, self.labels, self.size, names), self.place.world
        with contextlib.ExitStack() as stack:
            world.agree_with_main(lambda: stack.enter_context(files.begin(self.settings(vae))))

            def write(number: int) -> int:
                files.write(number, self.batch(number))
                return len(files.numbers(number))

            for _ in self._done(world.from_main(files.missing() if world.is_main else []), write, int):
                pass
            if not world.is_main:
                return np.empty((0, 0, 0, 0), dtype=np.uint8)
            one = files.read(1)
            columns = max(1, GRID_BYTES // (one.nbytes * classes))
            shown = files.read(min(len(self.labels), columns * classes, max(1, GRID_BYTES // one.nbytes)))
            files.finish()
            return shown

    def settings(self, vae: Path | None) -> dict[str, Any]:
        """What decides every byte of the samples, as far as this program does."""
        return {
            "weights": self.weights,
            "step": self.generator.step,
            "samples": len(self.labels),
            "classes": list(dict.fromkeys(self.labels.tolist())),
            "sampler": self.sampler.name,
            "steps": self.sampler.steps_for(self.generator.process),
            "guidance": self.sampler.guidance,
            "guidance_channels": self.sampler.guidance_channels,
            "seed": self.seed,
            "at_once": self.size,
            "precision": self.place.precision,
            "vae": None if vae is None else str(vae.resolve()),
        }

    def _done(self, batches: Sequence[int], work: Callable[[int], Any], count: Callable[[Any], int]) -> Iterator[Any]:
        """Results of batches, with a bar meanwhile."""
        whole = sum(min(self.size, len(self.labels) - number * self.size) for number in batches)
        done = 0
        with progress_bar(Console(stderr=True), "sampling", self.place.is_main) as progress:
            self.report = lambda images: progress(done + images, whole)
            for found in self.place.each(batches, work):
                done += count(found)
                progress(done, whole)
                yield found
