"""Batches for one rank, read ahead by a thread. The whole state is one number: the samples that all ranks have seen.

with BatchLoader(data, global_batch_size=256, rank=rank, world_size=world) as loader:
    for batch in loader: ...
    state = loader.sample          # BatchLoader(…, sample=state) goes on with the very next batch
"""

from __future__ import annotations

import queue
import threading

import numpy as np

from siamesenorm.data.batches import Batch, Batches, pinned
from siamesenorm.data.packing import TrainingData
from siamesenorm.errors import DataError


class BatchLoader(Batches):
    """Sequences of tokens: rank r of W has the r-th of W parts of each global batch.

    Where W does not divide it, the first ranks have one sequence more than the others. So the ranks together have the
    same samples in the same order whatever W is.

    prefetch: batches made ahead by a thread; with 0 there is none.
    """

    def __init__(
        self,
        data: TrainingData,
        global_batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        sample: int = 0,
        prefetch: int = 2,
        pin_memory: bool = False,
    ) -> None:
        if prefetch < 0:
            raise DataError.not_allowed("prefetch", prefetch, "0 or more")
        self.data, self.prefetch = data, prefetch
        super().__init__(global_batch_size, rank=rank, world_size=world_size, sample=sample, pin_memory=pin_memory)

    def epochs(self) -> dict[str, float]:
        """How often each corpus has been gone through."""
        return self.data.epochs(self._sample)

    def _next(self) -> Batch:
        if self.prefetch and self._ahead is None:
            self._ahead = _Ahead(self, self._sample, self.prefetch)
        batch: Batch = self._ahead.take() if self._ahead else self.make(self._sample)
        return batch

    def make(self, sample: int) -> Batch:
        """The rank's part of the global batch that starts at a sample."""
        part, more = divmod(self.global_batch_size, self.world_size)
        first = self.rank * part + min(self.rank, more)
        batch = self.data.batch(sample + first + np.arange(part + (self.rank < more), dtype=np.int64))
        return pinned(batch) if self.pin_memory else batch

    def close(self) -> None:
        """Stop the thread."""
        if self._ahead is not None:
            self._ahead.stop()
            self._ahead = None


class _Ahead:
    """A thread that makes batches into a short queue; its errors are raised where the batch is taken."""

    def __init__(self, loader: BatchLoader, sample: int, depth: int) -> None:
        self._make, self._step = loader.make, loader.global_batch_size
        self._queue: queue.Queue[Batch | BaseException] = queue.Queue()
        self._room = threading.Semaphore(depth)
        self._stopped = False
        self._thread = threading.Thread(target=self._run, args=(sample,), name="batches", daemon=True)
        self._thread.start()

    def _run(self, sample: int) -> None:
        try:
            while self._room.acquire() and not self._stopped:
                self._queue.put(self._make(sample))
                sample += self._step
        except BaseException as error:
            self._queue.put(error)

    def take(self) -> Batch:
        batch = self._queue.get()
        self._room.release()
        if isinstance(batch, BaseException):
            self._queue.put(batch)
            raise batch
        return batch

    def stop(self) -> None:
        self._stopped = True
        self._room.release()
        self._thread.join()
