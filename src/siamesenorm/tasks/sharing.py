"""Work that processes share: each does every so-many-th part, and all of them get the results in order."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import Any, TypeVar

from torch import nn
from torch.distributed.tensor import DTensor

from siamesenorm.data.seeding import mixed
from siamesenorm.errors import DataError

Part = TypeVar("Part")
Result = TypeVar("Result")
Gather = Callable[[Any], list[Any]]
"""One value of every process that has work of its own, in order, to all of them."""


@dataclass(frozen=True)
class Sharing:
    """Which of how many processes this one is, and how they tell each other what they have found.

    together: whether all must go through the model equally often, since each holds a part of it only.
    """

    rank: int = 0
    size: int = 1
    gather: Gather = lambda value: [value]
    together: bool = False

    def each(self, parts: Iterable[Part], work: Callable[[Part], Result]) -> Iterator[Result]:
        """``work(part)`` for every part, in order and in all processes; so many parts as there are at a time.

        A part is worked on as it would be by one process, so that the results are the same. An error in one process
        is raised in all of them.
        """
        if self.size == 1:
            yield from map(work, parts)
            return
        for batch in in_batches(parts, self.size):
            mine = batch[self.rank : self.rank + 1] or batch[:1] * self.together
            yield from self._answers(work, mine)[: len(batch)]

    def split(self, items: Sequence[Part], work: Callable[[list[Part]], Sequence[Result]]) -> list[Result]:
        """Results for all items in order, where ``work`` takes a list and this process's is every size-th item."""
        if self.size == 1:
            return list(work(list(items)))
        found: list[Any] = [None] * len(items)
        for rank, results in enumerate(self._answers(work, [list(items[self.rank :: self.size])])):
            found[rank :: self.size] = results
        return found

    def _answers(self, work: Callable[[Any], Any], mine: Sequence[Any]) -> list[Any]:
        """Every process's result; what one of them could not do is an error of all."""
        result, failure = None, None
        try:
            for part in mine:
                result = work(part)
        except Exception as error:
            failure = error
        answers = self.gather((result, None if failure is None else str(failure) or type(failure).__name__))
        if failure is not None:
            raise failure
        for rank, (_, problem) in enumerate(answers):
            if problem is not None:
                raise DataError(problem if rank == 0 else f"process {rank}: {problem}")
        return [result for result, _ in answers]


def in_batches(parts: Iterable[Part], size: int) -> Iterator[tuple[Part, ...]]:
    """So many parts after each other at a time."""
    left = iter(parts)
    while batch := tuple(islice(left, size)):
        yield batch


def is_divided(model: nn.Module) -> bool:
    """Whether a process holds a part of the model's weights only."""
    return any(isinstance(parameter, DTensor) for parameter in model.parameters())


def mixed_seed(seed: int, number: int) -> int:
    """A generator's seed for one of many samples, whoever draws it."""
    return mixed(seed, number * 0xBF58476D1CE4E5B9 + 1)
