"""What a user's own model learns from: tokens, a Dataset, or a function that gives batches.

Each source gives the batch of any sample of any seed, whatever was asked before: so runs of the same seed see the same
data in the same order, and an interrupted run goes on with the batch it would have seen.
"""

from __future__ import annotations

import hashlib
import inspect
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from siamesenorm.data.batches import Batch, Batches
from siamesenorm.data.held_out import AIM, NEEDED
from siamesenorm.data.order import shuffled
from siamesenorm.data.packing import TrainingData
from siamesenorm.data.seeding import mixed, seeded
from siamesenorm.data.texts import HELD_OUT
from siamesenorm.data.tokens import Tokens
from siamesenorm.errors import DataError
from siamesenorm.tasks.metrics import FREQUENCY_TOKENS, entropy

SPLITS = ("train", "val")
"""What a function is asked for."""
BATCHES = 20
"""Batches of a function that runs are measured on, where nothing else is said."""
FIXED = 2**40
"""Seed of what is held out: the same for every run."""


class BatchSource(ABC):
    """Training batches by sample, and held-out ones."""

    kind: str
    sha256: str | None = None
    """Of the data, where that is known."""

    @abstractmethod
    def batch(self, seed: int, sample: int, size: int) -> Any:
        """The training batch of a seed that begins with a sample."""

    @abstractmethod
    def held_out(self, size: int) -> Iterator[Any]:
        """The same batches every time."""

    @abstractmethod
    def held_out_size(self, size: int) -> int:
        """How many tokens or samples these have."""

    def chance_loss(self) -> float | None:
        """The loss of knowing nothing of the input, where it is known."""
        return None


class TokenSource(BatchSource):
    """Sequences of tokens and their next ones: ``(inputs, labels)``, each (rows, tokens)."""

    kind = "tokens"

    def __init__(self, train: Sequence[Tokens], held_out: Sequence[Tokens], length: int) -> None:
        self.train, self.held, self.length = list(train), list(held_out), length
        self._orders: dict[int, TrainingData] = {}

    @classmethod
    def of_array(cls, array: Any, validation: Any, length: int) -> TokenSource:
        """Of arrays in memory; without a second one, the end of the first is held out."""
        ids = as_tokens(array, "data")
        if validation is not None:
            held = as_tokens(validation, "validation")
        else:
            count = max(math.ceil(len(ids) * HELD_OUT), AIM)
            if len(ids) < NEEDED:
                raise DataError(f"data: {len(ids):,} tokens are too few to hold some out; it takes {NEEDED:,} or more")
            ids, held = ids[:-count], ids[-count:]
        source = cls([Tokens([ids], name="data")], [Tokens([held], name="validation")], length)
        source.sha256 = hashlib.sha256(ids.tobytes() + held.tobytes()).hexdigest()
        return source

    def batch(self, seed: int, sample: int, size: int) -> tuple[Tensor, Tensor]:
        """Sequences in the order of the seed."""
        if seed not in self._orders:
            self._orders[seed] = TrainingData(self.train, self.length, seed=seed)
        rows = self._orders[seed].batch(np.arange(sample, sample + size, dtype=np.int64))
        return rows["input_ids"], rows["labels"]

    def held_out(self, size: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Whole sequences, one after another."""
        for tokens in self.held:
            starts = np.arange((len(tokens) - 1) // self.length, dtype=np.int64) * self.length
            for first in range(0, len(starts), size):
                rows = torch.from_numpy(tokens.gather(starts[first : first + size], self.length + 1).astype(np.int64))
                yield rows[:, :-1], rows[:, 1:]

    def held_out_size(self, size: int) -> int:
        """Tokens that are predicted."""
        return sum((len(tokens) - 1) // self.length * self.length for tokens in self.held)

    def chance_loss(self) -> float:
        """Entropy of the frequencies of tokens."""
        return entropy(np.bincount(self.train[0].read(0, min(len(self.train[0]), FREQUENCY_TOKENS))))


def as_tokens(array: Any, name: str) -> Any:
    """An array, tensor or list of ids as tokens are stored."""
    try:
        values = np.asarray(array.detach().cpu() if isinstance(array, Tensor) else array)
    except (TypeError, ValueError, RuntimeError):  # rows of different lengths, or of tensors
        raise DataError(f"{name}: it is no array of tokens; it takes whole numbers in one row") from None
    if values.ndim != 1 or values.dtype.kind not in "iu" or not values.size:
        raise DataError(
            f"{name}: an array of shape {values.shape} and type {values.dtype} is not allowed; "
            "it takes whole numbers in one row"
        )
    low, high = int(values.min()), int(values.max())
    if low < 0 or high >= 2**32:
        raise DataError(f"{name}: id {low if low < 0 else high} is not allowed; ids are 0 to {2**32 - 1}")
    return values.astype("<u2" if high < 2**16 else "<u4")


class DatasetSource(BatchSource):
    """Items of a map-style Dataset, put together by torch's collation; some are held out, the same for all seeds."""

    kind = "dataset"

    def __init__(self, dataset: Any, validation: Any = None) -> None:
        self.dataset, self.validation = dataset, validation
        count = len(dataset)
        held = 0 if validation is not None else max(1, math.ceil(count * HELD_OUT))
        if count - held < 1:
            raise DataError(f"data: a Dataset of {count} items is too small; it takes 2 or more")
        places = shuffled(np.arange(count, dtype=np.int64), count, FIXED)
        self.held, self.items = np.sort(places[:held]), np.sort(places[held:])

    def batch(self, seed: int, sample: int, size: int) -> Any:
        """Items in the order of the seed; what is random in them comes from seed and sample."""
        places = shuffled(np.arange(sample, sample + size, dtype=np.int64), len(self.items), seed)
        return self._collated(self.dataset, self.items[places], mixed(seed, sample))

    def held_out(self, size: int) -> Iterator[Any]:
        """In their order."""
        data = self.dataset if self.validation is None else self.validation
        items = self.held if self.validation is None else np.arange(len(self.validation))
        for first in range(0, len(items), size):
            yield self._collated(data, items[first : first + size], FIXED + first)

    def held_out_size(self, size: int) -> int:
        """Items."""
        return len(self.held) if self.validation is None else len(self.validation)

    @staticmethod
    def _collated(data: Any, items: Any, seed: int) -> Any:
        with seeded(seed):
            found = [data[int(item)] for item in items]
        try:
            return torch.utils.data.default_collate(found)
        except (RuntimeError, TypeError, KeyError) as error:
            raise DataError(
                f"data: items {', '.join(map(str, items[:3]))}, … of the Dataset cannot be put together "
                f"({' '.join(str(error).split())}); it takes items of one shape, or a function that gives batches"
            ) from None


class FunctionSource(BatchSource):
    """A function of ``"train"`` or ``"val"`` that gives a batch; what is random in it comes from seed and sample."""

    kind = "function"

    def __init__(
        self, function: Callable[[str], Any], batches: int, validation: Callable[[str], Any] | None = None
    ) -> None:
        self.function, self.batches, self.validation = function, batches, validation or function
        for name, asked in (("data", self.function), ("validation", self.validation)):
            if problem := call_problem(asked, SPLITS[0]):
                raise DataError(
                    f"{name}: the function cannot be given a split ({problem}); it takes one of 'train' or 'val'"
                )

    def batch(self, seed: int, sample: int, size: int) -> Any:
        """What it gives for training."""
        return self._ask(self.function, SPLITS[0], mixed(seed, sample))

    def held_out(self, size: int) -> Iterator[Any]:
        """What it gives for validation, the same for every run."""
        for number in range(self.batches):
            yield self._ask(self.validation, SPLITS[1], FIXED + number)

    @staticmethod
    def _ask(function: Callable[[str], Any], split: str, seed: int) -> Any:
        try:
            with seeded(seed):
                return function(split)
        except StopIteration:
            raise DataError(
                f"data: the function has no further batch for {split!r} (StopIteration); it takes one that can be "
                "asked without end"
            ) from None

    def check(self) -> None:
        """Raise where a batch does not come from the seed: no two runs would see the same data."""
        for split, asked in zip(SPLITS, (self.function, self.validation), strict=True):
            first, again = (self._ask(asked, split, FIXED) for _ in range(2))
            if not same(first, again):
                raise DataError(
                    f"data: the function gave two different batches for {split!r} where torch, numpy and random had "
                    "the same seed, so that runs would not see the same data; it takes one without a state of its own"
                )

    def held_out_size(self, size: int) -> int:
        """Rows of all batches."""
        return sum(rows_of(batch) for batch in self.held_out(size))


def call_problem(function: Callable[..., Any], argument: object) -> str:
    """Why a function cannot be called with one argument; nothing where it can."""
    try:
        inspect.signature(function).bind(argument)
    except TypeError as error:
        return str(error)
    except ValueError:  # what is written in C has no signature
        pass
    return ""


def same(batch: Any, other: Any) -> bool:
    """Whether two batches hold the same tensors and numbers."""
    leaves, spec = torch.utils._pytree.tree_flatten(batch)
    others, other_spec = torch.utils._pytree.tree_flatten(other)
    if spec != other_spec:
        return False
    for one, two in zip(leaves, others, strict=True):
        arrays = [torch.as_tensor(leaf) for leaf in (one, two) if isinstance(leaf, (Tensor, np.ndarray, int, float))]
        if len(arrays) == 2 and not (arrays[0].shape == arrays[1].shape and arrays[0].equal(arrays[1].to(arrays[0]))):
            return False
    return True


def rows_of(batch: Any) -> int:
    """Samples of a batch: the length of its first tensor."""
    leaves = torch.utils._pytree.tree_leaves(batch)
    return next((len(leaf) for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()), 1)


class OwnLoader(Batches):
    """The batches of a source for one process."""

    def __init__(self, source: BatchSource, seed: int, size: int, sample: int) -> None:
        self.source, self.seed = source, seed
        super().__init__(size, sample=sample)

    def make(self, sample: int) -> Batch:
        """Whatever the source gives, under one name."""
        return {"batch": self.source.batch(self.seed, sample, self.global_batch_size)}

    def _next(self) -> Batch:
        return self.make(self._sample)

    def close(self) -> None:
        """Nothing is made ahead."""
