"""Batches of augmented images for one rank, in this process or made ahead by others.

The whole state is one number, the samples that all ranks have been given. Which image sample k is and how it is
augmented are functions of the seed and k alone, so neither the number of ranks nor that of workers changes them.
"""

from __future__ import annotations

import itertools
import signal
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch.utils.data import DataLoader, Dataset

from siamesenorm.data.batches import Batch, Batches, pinned
from siamesenorm.data.images.imageset import ImageSet
from siamesenorm.data.images.transforms import Transform
from siamesenorm.data.order import shuffled
from siamesenorm.errors import DataError


class TrainingImages:
    """Images in the order of training, shuffled anew in every epoch.

    repeats: how often an image comes in a row, each time augmented differently (repeated augmentation, arXiv
        1901.09335). As in DeiT an epoch stays as many samples as there are images, so it has a part of them.
    """

    def __init__(self, images: ImageSet, transform: Transform, *, seed: int = 0, repeats: int = 1) -> None:
        self.images, self.transform, self.seed, self.repeats = images, transform, seed, repeats

    def numbers(self, samples: NDArray[np.int64]) -> NDArray[np.int64]:
        """Which image each sample is."""
        size = len(self.images)
        epochs, places = np.divmod(samples, size)
        return shuffled(epochs * size + places // self.repeats, size, self.seed)

    def batch(self, samples: NDArray[np.int64]) -> Batch:
        """The images of samples, ready for a model, with their labels."""
        numbers = self.numbers(samples)
        seen = [
            self.transform(self.images[int(number)], np.random.default_rng((self.seed, int(sample))))
            for sample, number in zip(samples, numbers, strict=True)
        ]
        return {"image": torch.from_numpy(np.stack(seen)), "label": torch.from_numpy(self.images.labels[numbers])}


class TestImages:
    """Held-out images in their own order and in batches, of which each rank has every world_size-th.

    A batch is the same on any number of ranks, so that what a model makes of it is too. ``counted`` in it says which
    images are to be measured. A rank with a batch less than others gets the first one once more, uncounted: a sharded
    model takes all ranks for a pass, so that all must have as many batches.
    """

    __test__ = False  # pytest takes the name for one of its own

    def __init__(self, images: ImageSet, transform: Transform, count: int | None = None) -> None:
        self.images, self.transform = images, transform
        whole = len(images)
        self.numbers = np.unique(np.linspace(0, whole - 1, min(count or whole, whole)).astype(np.int64))

    def __len__(self) -> int:
        return int(self.numbers.size)

    def batches(self, size: int, *, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        """All of a rank's images, so many at a time."""
        parts = [self.numbers[start : start + size] for start in range(0, self.numbers.size, size)]
        generator = np.random.default_rng(0)
        for first in range(0, len(parts), world_size):
            mine = first + rank
            part = parts[mine] if mine < len(parts) else parts[0]
            seen = [self.transform(self.images[int(number)], generator) for number in part]
            yield {
                "image": torch.from_numpy(np.stack(seen)),
                "label": torch.from_numpy(self.images.labels[part]),
                "counted": torch.full((len(part),), mine < len(parts)),
            }


class ImageLoader(Batches):
    """Images: rank r of W has every W-th sample from the r-th on, so that repeats of an image go to different ranks.

    workers: processes that make batches ahead; 0 makes them here, when they are asked for.
    prefetch: batches that each worker makes ahead.
    """

    def __init__(
        self,
        data: TrainingImages,
        global_batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        sample: int = 0,
        workers: int = 0,
        prefetch: int = 2,
        pin_memory: bool = False,
    ) -> None:
        self.data, self.workers, self.prefetch = data, workers, prefetch
        super().__init__(global_batch_size, rank=rank, world_size=world_size, sample=sample, pin_memory=pin_memory)

    def _next(self) -> Batch:
        if self.workers and self._ahead is None:
            self._ahead = self._start()
        batch: Batch | str = self.make(self._sample) if self._ahead is None else next(self._ahead)
        if isinstance(batch, str):
            raise DataError(batch)
        return pinned(batch) if self.pin_memory else batch

    def make(self, sample: int) -> Batch:
        """The rank's part of the global batch that starts at a sample."""
        return self.data.batch(sample + np.arange(self.rank, self.global_batch_size, self.world_size, dtype=np.int64))

    def _start(self) -> Iterator[Any]:
        loader: DataLoader[Any] = DataLoader(
            _BatchDataset(self.data, self.rank, self.global_batch_size, self.world_size),
            batch_size=None,
            sampler=itertools.count(self._sample, self.global_batch_size),  # first samples of batches, without end
            num_workers=self.workers,
            prefetch_factor=max(1, self.prefetch),
            worker_init_fn=_leave_signals_to_the_first,
            generator=torch.Generator(),  # it draws a seed for workers, which nothing here uses
        )
        return iter(loader)

    def close(self) -> None:
        """Stop the workers."""
        self._ahead = None


class _BatchDataset(Dataset[Any]):
    """Batches by their first sample. An error goes to the first process as its sentence, without a worker's trace."""

    def __init__(self, data: TrainingImages, rank: int, size: int, world_size: int) -> None:
        self.data, self.offsets = data, np.arange(rank, size, world_size, dtype=np.int64)

    def __getitem__(self, sample: int) -> Batch | str:
        try:
            return self.data.batch(sample + self.offsets)
        except DataError as error:
            return str(error)


def _leave_signals_to_the_first(worker: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the run finishes its step and saves
