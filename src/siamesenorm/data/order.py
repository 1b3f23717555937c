"""The order of training samples: which sequence sample k is, as a pure function of the seed and k.

Nothing is stored and nothing is drawn one after another, so a run resumes at any sample, at any world size, at once.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from siamesenorm.errors import DataError

SampleNumbers = NDArray[np.int64]
ROUNDS = 4
SLOTS = 10_000
"""Samples in which a mixture has exactly its shares; a weight is rounded to a ten-thousandth."""


def shuffled(samples: SampleNumbers, size: int, seed: int) -> SampleNumbers:
    """Where each sample lies among `size` items: every run of `size` samples is a permutation of its own.

    A Feistel network on a grid of a × b >= size cells: each round adds a hash of one coordinate to the other, which
    can be undone and so is one to one. The few cells beyond `size` are sent through again until they fall inside.
    """
    if size < 1:
        raise DataError.not_allowed("size", size, "1 or more")
    epochs, items = np.divmod(samples.astype(np.int64), size)
    keys = _mix(_mix(np.full(1, seed % (1 << 64), dtype=np.uint64)) + epochs.astype(np.uint64))
    height = np.uint64(math.isqrt(size - 1) + 1)
    width = np.uint64(-(-size // int(height)))
    cells = _walk(items.astype(np.uint64), keys, height, width)
    while (outside := cells >= size).any():
        cells[outside] = _walk(cells[outside], keys[outside], height, width)
    return cells.astype(np.int64)


def _walk(
    cells: NDArray[np.uint64], keys: NDArray[np.uint64], height: np.uint64, width: np.uint64
) -> NDArray[np.uint64]:
    row, column = np.divmod(cells, width)
    for number in range(ROUNDS):
        salt = keys + np.uint64(number)
        row = (row + _mix(salt ^ (column << np.uint64(8))) % height) % height
        column = (column + _mix(~salt ^ (row << np.uint64(8))) % width) % width
    return row * width + column


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """The finaliser of splitmix64: every bit of the input reaches every bit of the output."""
    mixed = values + np.uint64(0x9E3779B97F4A7C15)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return mixed ^ (mixed >> np.uint64(31))


class Order:
    """Sample k as (corpus, sequence): each corpus in shuffled epochs of its own, mixed by weight.

    Without weights the corpora are one: an epoch has every sequence of all of them once. With weights, every
    `SLOTS` samples have exactly the corpus's share of sequences, shuffled anew, and a corpus that is used up
    begins its next epoch while the others go on.
    """

    def __init__(self, sizes: Sequence[int], weights: Sequence[float] | None = None, *, seed: int = 0) -> None:
        self.sizes = list(sizes)
        self.seed = seed
        self._edges = np.cumsum([0, *self.sizes])
        self._slots = None if weights is None else _slots(weights, len(self.sizes))

    def locate(self, samples: SampleNumbers) -> tuple[SampleNumbers, SampleNumbers]:
        """Corpus and sequence of samples."""
        if self._slots is None:
            places = shuffled(samples, int(self._edges[-1]), self.seed)
            corpora = np.searchsorted(self._edges, places, side="right") - 1
            return corpora, places - self._edges[corpora]
        corpora, drawn = self._drawn(samples, self._slots)
        sequences = np.empty_like(drawn)
        for number in np.unique(corpora):
            mine = corpora == number
            sequences[mine] = shuffled(drawn[mine], self.sizes[number], self.seed + 1 + int(number))
        return corpora, sequences

    def epochs(self, samples: int) -> list[float]:
        """How often each corpus has been gone through after so many samples."""
        if self._slots is None:
            return [samples / int(self._edges[-1])] * len(self.sizes)
        rounds, rest = divmod(samples, SLOTS)
        corpora, _ = self._drawn(np.arange(rounds * SLOTS, rounds * SLOTS + rest), self._slots)
        counts = rounds * np.diff(self._slots) + np.bincount(corpora, minlength=len(self.sizes))
        return [int(count) / size for count, size in zip(counts, self.sizes, strict=True)]

    def _drawn(self, samples: SampleNumbers, slots: SampleNumbers) -> tuple[SampleNumbers, SampleNumbers]:
        """Corpus of each sample, and how many were drawn from that corpus in the slots before its own."""
        places = shuffled(samples, SLOTS, self.seed)
        corpora = np.searchsorted(slots, places, side="right") - 1
        shares = np.diff(slots)
        return corpora, samples // SLOTS * shares[corpora] + places - slots[corpora]


def _slots(weights: Sequence[float], count: int) -> SampleNumbers:
    """Edges of the corpora among the slots, by largest remainder."""
    if len(weights) != count:
        raise DataError(f"weights: {len(weights)} given for {count} corpora; one each is needed")
    for weight in weights:
        if not (math.isfinite(weight) and weight > 0):
            raise DataError.refused("weights", weight, "a weight is a number above 0")
    exact = np.asarray(weights, dtype=np.float64) / math.fsum(weights) * SLOTS
    shares = np.floor(exact).astype(np.int64)
    for number in np.argsort(-(exact - shares), kind="stable")[: SLOTS - int(shares.sum())]:
        shares[number] += 1
    if not shares.all():
        smallest = min(weights)
        raise DataError.refused("weights", smallest, f"a weight is at least 1/{SLOTS} of their sum")
    return np.cumsum([0, *shares])
