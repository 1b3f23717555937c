"""Batches for one rank, read ahead by a thread. The whole state is one number: the samples that all ranks have seen.

with BatchLoader(data, global_batch_size=256, rank=rank, world_size=world) as loader:
    for batch in loader: ...
    state = loader.sample          # BatchLoader(…, sample=state) goes on with the very next batch
"""

from __future__ import annotations

import queue
import threading
from collections.abc import Mapping
from types import TracebackType

import numpy as np

from siamesenorm.data.errors import DataError
from siamesenorm.data.packing import Batch, TrainingData


class BatchLoader:
    """An endless iterator over a rank's part of each global batch.

    Global batch b is samples b·G to (b+1)·G - 1; rank r of W has the r-th of W equal parts of it. So the ranks
    together have the same samples in the same order whatever W is.

    sample: samples that were seen before, by all ranks together.
    prefetch: batches made ahead; with 0 there is no thread.
    pin_memory: put batches in page-locked memory, for copies to a GPU that do not wait.
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
        if not 0 <= rank < world_size:
            raise DataError(f"rank: {rank} is not allowed; with world_size {world_size} it takes 0 to {world_size - 1}")
        if global_batch_size < 1 or global_batch_size % world_size:
            raise DataError(
                f"global_batch_size: {global_batch_size} is not allowed; it takes multiples of world_size {world_size}"
            )
        if prefetch < 0:
            raise DataError(f"prefetch: {prefetch} is not allowed; it takes 0 or more")
        self.data, self.global_batch_size = data, global_batch_size
        self.rank, self.world_size = rank, world_size
        self.prefetch, self.pin_memory = prefetch, pin_memory
        self._ahead: _Ahead | None = None
        self.seek(sample)

    @property
    def sample(self) -> int:
        """Samples that all ranks have been given; batches made ahead do not count."""
        return self._sample

    def seek(self, sample: int) -> None:
        """Go on from here."""
        if isinstance(sample, bool) or sample < 0:
            raise DataError(f"sample: {sample} is not allowed; it takes 0 or more")
        self.close()
        self._sample = int(sample)

    def epochs(self) -> dict[str, float]:
        """How often each corpus has been gone through."""
        return self.data.epochs(self._sample)

    def state_dict(self) -> dict[str, int]:
        """The state as checkpoints take it."""
        return {"sample": self._sample}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from a state, of whatever world size and batch size."""
        if set(state) != {"sample"}:
            raise DataError(f"loader state: {sorted(state)} given; it takes 'sample' and nothing else")
        self.seek(state["sample"])

    def __iter__(self) -> BatchLoader:
        return self

    def __next__(self) -> Batch:
        if self.prefetch and self._ahead is None:
            self._ahead = _Ahead(self, self._sample, self.prefetch)
        batch = self._ahead.take() if self._ahead else self.make(self._sample)
        self._sample += self.global_batch_size
        return batch

    def make(self, sample: int) -> Batch:
        """The rank's part of the global batch that starts at a sample."""
        part = self.global_batch_size // self.world_size
        batch = self.data.batch(sample + self.rank * part + np.arange(part, dtype=np.int64))
        return {name: values.pin_memory() for name, values in batch.items()} if self.pin_memory else batch

    def close(self) -> None:
        """Stop reading ahead; the loader can still be used and goes on where it was."""
        if self._ahead is not None:
            self._ahead.stop()
            self._ahead = None

    def __enter__(self) -> BatchLoader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _Ahead:
    """A thread that makes batches into a short queue; its errors are raised where the batch is taken."""

    def __init__(self, loader: BatchLoader, sample: int, depth: int) -> None:
        self._make, self._step = loader.make, loader.global_batch_size
        self._made: queue.Queue[Batch | BaseException] = queue.Queue()
        self._room = threading.Semaphore(depth)
        self._stopped = False
        self._thread = threading.Thread(target=self._run, args=(sample,), name="batches", daemon=True)
        self._thread.start()

    def _run(self, sample: int) -> None:
        try:
            while self._room.acquire() and not self._stopped:
                self._made.put(self._make(sample))
                sample += self._step
        except BaseException as error:
            self._made.put(error)

    def take(self) -> Batch:
        made = self._made.get()
        self._room.release()
        if isinstance(made, BaseException):
            self._made.put(made)
            raise made
        return made

    def stop(self) -> None:
        self._stopped = True
        self._room.release()
        self._thread.join()
