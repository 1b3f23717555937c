"""Generated arithmetic: problems of graded size, of which some are held out and never written for training.

A document is a column of problems such as ``12 + 34 = 46``. Whether a problem is held out depends on its two
numbers and operation alone; ``12 + 34`` and ``34 + 12`` count as one problem, so neither tells the other.
"""

from __future__ import annotations

import hashlib
import random
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, fields
from typing import NamedTuple

from siamesenorm.data.documents import SPLITS, Document, Piece, Reading, Source, unit_hash
from siamesenorm.errors import DataError

OPERATIONS = ("+", "-", "*")
LINES = 24
"""Problems in a document."""

DRAWS = 100_000
"""Draws for one problem after which its split is taken as empty."""


class Problem(NamedTuple):
    """Two numbers and an operation."""

    left: int
    operation: str
    right: int

    @property
    def answer(self) -> int:
        """The right result."""
        if self.operation == "*":
            return self.left * self.right
        return self.left + self.right if self.operation == "+" else self.left - self.right

    @property
    def question(self) -> str:
        """``12 + 34 =``"""
        return f"{self.left} {self.operation} {self.right} ="

    @property
    def line(self) -> str:
        """``12 + 34 = 46``"""
        return f"{self.question} {self.answer}"

    @property
    def digits(self) -> int:
        """Digits of the larger number: the grade of the problem."""
        return max(len(str(self.left)), len(str(self.right)))

    @property
    def key(self) -> str:
        """What is held out or not: the problem, with the numbers in order where their order does not matter."""
        left, operation, right = self
        return f"{right}{operation}{left}" if operation != "-" and right < left else f"{left}{operation}{right}"


@dataclass(frozen=True)
class Arithmetic:
    """Settings of the generated problems.

    problems: lines written for both splits together.
    digits: largest grade of addition and subtraction.
    product_digits: largest grade of multiplication.
    held_out: share of all problems that is never trained on.
    seed: decides what is drawn and what is held out.
    """

    problems: int = 120_000
    digits: int = 3
    product_digits: int = 2
    held_out: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        for name, low, high in (("problems", LINES, 10**12), ("digits", 1, 30), ("product_digits", 1, 30)):
            value = getattr(self, name)
            if isinstance(value, bool) or not isinstance(value, int) or not low <= value <= high:
                raise DataError.not_allowed(f"arithmetic: {name} =", value, f"{low} to {high}")
        if not 0.001 <= self.held_out <= 0.9:
            raise DataError.not_allowed("arithmetic: held_out =", self.held_out, "0.001 to 0.9")

    @classmethod
    def parse(cls, text: str, seed: int = 0) -> Arithmetic:
        """Settings of ``problems=100000,digits=2``."""
        kinds = {field.name: float if field.name == "held_out" else int for field in fields(cls)}
        values: dict[str, float] = {"seed": seed}
        for item in text.split(",") if text else []:
            name, equals, value = (part.strip() for part in item.partition("="))
            if not equals or name not in kinds:
                raise DataError(
                    f"arithmetic: {item!r} is not an option; the options are {', '.join(kinds)} (name=value)"
                )
            try:
                values[name] = kinds[name](value)
            except ValueError:
                raise DataError.not_allowed(f"arithmetic: {name} =", value, "a number") from None
        return cls(**values)  # type: ignore[arg-type]

    def split_of(self, problem: Problem) -> str:
        """Train, or validation for what is held out."""
        return "validation" if unit_hash(problem.key.encode(), self.seed) < self.held_out else "train"

    def draw(self, chance: random.Random, split: str) -> Problem:
        """A problem of a split: operation and grade are drawn evenly, then the numbers."""
        for _ in range(DRAWS):
            operation = OPERATIONS[_below(chance, 3)]
            grade = 1 + _below(chance, self.product_digits if operation == "*" else self.digits)
            larger, other = _number(chance, grade), _number(chance, 1 + _below(chance, grade))
            left, right = (larger, other) if chance.random() < 0.5 else (other, larger)
            problem = Problem(left, operation, right)
            if self.split_of(problem) == split:
                return problem
        raise DataError(
            f"arithmetic: no problem of {self.digits} digits is in the {split} split; change held_out or seed"
        )

    def document(self, split: str, number: int) -> str:
        """Document `number` of a split; nothing else decides what it holds."""
        chance = random.Random(f"arithmetic {self.seed} {split} {number}")
        return "".join(f"{self.draw(chance, split).line}\n" for _ in range(LINES))

    def documents(self, split: str) -> Iterator[str]:
        """All documents of a split."""
        for number in range(self.counts()[SPLITS.index(split)]):
            yield self.document(split, number)

    def counts(self) -> tuple[int, int]:
        """Documents of the two splits."""
        total = self.problems // LINES
        held = max(1, round(total * self.held_out))
        return max(1, total - held), held


@dataclass(frozen=True)
class ArithmeticCorpus(Source):
    """``arithmetic``: the documents of both splits, each of which says which one it is of."""

    name: str
    settings: Arithmetic
    kind = "embedded"

    def size(self) -> int:
        """About the bytes of the documents."""
        return sum(self.settings.counts()) * self._document_size()

    def sha256(self) -> str:
        """Of the settings and of the first document: the rest follows from them."""
        return hashlib.sha256(f"{self.settings} {self.settings.document('train', 0)}".encode()).hexdigest()

    def pieces(self, target: int, reading: Reading) -> list[Piece]:
        """Runs of documents, the training ones first."""
        size, total = self._document_size(), sum(self.settings.counts())
        step = max(1, target // size)
        stops = [min(start + step, total) for start in range(0, total, step)]
        return [Piece(number * step, stop, size * (stop - number * step)) for number, stop in enumerate(stops)]

    def read(self, piece: Piece, reading: Reading, skipped: Counter[str]) -> Iterator[Document]:
        """The documents of a run."""
        train, _ = self.settings.counts()
        for number in range(piece.start, piece.stop):
            split, place = ("train", number) if number < train else ("validation", number - train)
            yield Document(self.settings.document(split, place), f"{split} {place}", split)

    def _document_size(self) -> int:
        return LINES * (2 * self.settings.digits + 10)


def _number(chance: random.Random, digits: int) -> int:
    """A number of exactly so many digits; 0 has one."""
    low = 10 ** (digits - 1) if digits > 1 else 0
    return low + _below(chance, 10**digits - low)


def _below(chance: random.Random, limit: int) -> int:
    # a fifth of randrange's time; a double is exact enough up to here
    return int(chance.random() * limit) if limit < 1 << 40 else chance.randrange(limit)
