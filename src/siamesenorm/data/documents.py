"""What every source of text gives: documents, in pieces that workers can read apart from each other."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from siamesenorm.data.atomic import sha256_of
from siamesenorm.errors import DataError

SPLITS = ("train", "validation")
Invalid = Literal["error", "replace", "skip"]
Unit = Literal["file", "line", "paragraph"]


@dataclass(frozen=True)
class Document:
    """One text, where it lies in its source, and its split where the source decides that itself."""

    text: str
    place: str
    split: str | None = None


@dataclass(frozen=True)
class Reading:
    """How sources are read.

    field: name of the JSONL field or of the column that holds the text.
    unit: what of a plain text file is one document.
    invalid: what happens to a document that cannot be read: stop, replace bad bytes by U+FFFD, or leave it out.
    seed, validation: what is held out: texts whose hash with this seed, 0 to 1, lies below.
    longest: bytes of a document that is on one side as a whole; longer ones are held out in parts. None: all are whole.
    """

    field: str = "text"
    unit: Unit = "file"
    invalid: Invalid = "error"
    seed: int = 0
    validation: float = 0.01
    longest: int | None = None


@dataclass(frozen=True)
class Piece:
    """Part of a source, from start to stop in the source's own unit (bytes, rows, documents), and its bytes."""

    start: int
    stop: int
    size: int


class Source(ABC):
    """Something that holds documents in a fixed order."""

    name: str
    kind: str

    @abstractmethod
    def size(self) -> int:
        """Bytes, for progress and for the size of shards."""

    @abstractmethod
    def sha256(self) -> str:
        """Changes if, and only if, what is read changes."""

    @abstractmethod
    def pieces(self, target: int, reading: Reading) -> list[Piece]:
        """Consecutive pieces of about `target` bytes; together they hold every document once."""

    @abstractmethod
    def read(self, piece: Piece, reading: Reading, skipped: Counter[str]) -> Iterator[Document]:
        """The documents of a piece in order; those left out are counted by reason."""


@dataclass(frozen=True)
class FileSource(Source):
    """A source that is one file."""

    name: str
    path: Path

    def size(self) -> int:
        """Bytes on disk."""
        return self.path.stat().st_size

    def sha256(self) -> str:
        """Of the bytes on disk."""
        return sha256_of(self.path)


def pieces_by_size(sizes: Sequence[int], target: int) -> list[Piece]:
    """Consecutive items gathered to pieces that reach the target, the last one excepted."""
    pieces = []
    start = total = 0
    for number, size in enumerate(sizes, start=1):
        total += size
        if total >= target or number == len(sizes):
            pieces.append(Piece(start, number, total))
            start, total = number, 0
    return pieces


def unit_hash(text: bytes, seed: int) -> float:
    """A number from 0 to below 1 that depends on nothing but the text and the seed."""
    key = (seed % (1 << 64)).to_bytes(8, "little")
    return int.from_bytes(hashlib.blake2b(text, digest_size=8, key=key).digest(), "little") / 2**64


def choose_split(text: bytes, seed: int, validation: float) -> str:
    """Train or validation, by the text alone: copies of a document never lie on both sides."""
    return "validation" if unit_hash(text, seed) < validation else "train"


def decode_text(raw: bytes, place: object, reading: Reading, skipped: Counter[str]) -> str | None:
    """Text of UTF-8 bytes, or None where it is to be left out."""
    try:
        return raw.decode("utf-8")
    except UnicodeDecodeError as error:
        if reading.invalid == "replace":
            return raw.decode("utf-8", errors="replace")
        if reading.invalid == "skip":
            skipped["invalid"] += 1
            return None
        raise DataError(
            f"{place}: byte {error.start} (0x{raw[error.start]:02x}) is not UTF-8; re-encode the text, "
            f"or set invalid to replace or skip"
        ) from None


def sound_text(value: object, place: object, reading: Reading, skipped: Counter[str]) -> str | None:
    """A field's value if it is text that UTF-8 can hold, or None where it is to be left out."""
    if isinstance(value, bytes):
        return decode_text(value, place, reading, skipped)
    if not isinstance(value, str):
        return refuse(place, f"field {reading.field!r} holds {_kind(value)}; allowed is text", reading, skipped)
    try:
        value.encode()
    except UnicodeEncodeError as error:
        if reading.invalid == "replace":
            return value.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        what = f"field {reading.field!r} holds half a surrogate pair at character {error.start}"
        return refuse(place, f"{what}; mend the text, or set invalid to replace or skip", reading, skipped)
    return value


def refuse(place: object, message: str, reading: Reading, skipped: Counter[str]) -> str | None:
    """Raise, or count what is left out."""
    if reading.invalid != "skip":
        raise DataError(f"{place}: {message}")
    skipped["invalid"] += 1
    return None


def _kind(value: object) -> str:
    names = {dict: "an object", list: "a list", bool: "true or false", int: "a number", float: "a number"}
    return "nothing (null)" if value is None else names.get(type(value), f"a {type(value).__name__}")
