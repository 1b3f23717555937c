"""What every loader is: a rank's batches without end, whose whole state is the number of samples all ranks have had."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import torch
from torch import Tensor

from siamesenorm.errors import DataError

Batch = dict[str, Tensor]


class Batches(ABC):
    """An endless iterator over a rank's part of each global batch; batch b is samples b·G to (b+1)·G - 1.

    sample: samples that were seen before, by all ranks together.
    pin_memory: put batches in page-locked memory, for copies to a GPU that do not wait.
    """

    def __init__(
        self,
        global_batch_size: int,
        *,
        rank: int = 0,
        world_size: int = 1,
        sample: int = 0,
        pin_memory: bool = False,
    ) -> None:
        if not 0 <= rank < world_size:
            raise DataError.refused("rank", rank, f"with world_size {world_size} it takes 0 to {world_size - 1}")
        if global_batch_size < world_size:
            raise DataError.not_allowed("global_batch_size", global_batch_size, f"world_size {world_size} or more")
        self.global_batch_size, self.rank, self.world_size = global_batch_size, rank, world_size
        self.pin_memory = pin_memory
        self._ahead: Any = None
        """What makes batches ahead, while it does."""
        self.seek(sample)

    @abstractmethod
    def make(self, sample: int) -> Batch:
        """The rank's part of the global batch that starts at a sample."""

    @abstractmethod
    def _next(self) -> Batch:
        """The batch at the present sample, made now or ahead."""

    @abstractmethod
    def close(self) -> None:
        """Stop making batches ahead; the loader can still be used and goes on where it was."""

    @property
    def sample(self) -> int:
        """Samples that all ranks have been given; batches made ahead do not count."""
        return self._sample

    def seek(self, sample: int) -> None:
        """Go on from here."""
        if isinstance(sample, bool) or sample < 0:
            raise DataError.not_allowed("sample", sample, "0 or more")
        self.close()
        self._sample = int(sample)

    def state_dict(self) -> dict[str, int]:
        """The state as checkpoints take it."""
        return {"sample": self._sample}

    def load_state_dict(self, state: Mapping[str, int]) -> None:
        """Go on from a state, of whatever world size and batch size."""
        if set(state) != {"sample"}:
            raise DataError(f"loader state: {sorted(state)} given; it takes 'sample' and nothing else")
        self.seek(state["sample"])

    def __iter__(self) -> Self:
        return self

    def __next__(self) -> Batch:
        batch = self._next()
        self._sample += self.global_batch_size
        return batch

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def to_device(batch: Any, device: torch.device) -> Any:
    """The same with all tensors on a device, however they are nested."""
    ahead = device.type != "cpu"  # on the way back nobody would wait for the copy
    return torch.utils._pytree.tree_map_only(Tensor, lambda values: values.to(device, non_blocking=ahead), batch)


def pinned(batch: Batch) -> Batch:
    """The same in page-locked memory."""
    return {name: values.pin_memory() for name, values in batch.items()}
