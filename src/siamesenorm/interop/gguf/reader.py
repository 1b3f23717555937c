"""GGUF files, read within what they really hold: a header is not believed before it fits into the file.

::

    file = GgufFile.open("model.gguf", "source")
    file.metadata["general.architecture"], file.tensor("token_embd.weight")
"""

from __future__ import annotations

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from siamesenorm.data.reading import named_path, reason_of
from siamesenorm.errors import InteropError
from siamesenorm.interop.gguf.quantised import LAYOUTS, dequantise

MAGIC, VERSIONS = b"GGUF", (2, 3)
SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
STRING, ARRAY = 8, 9
ALIGNMENT = 32
LONGEST_NAME, MOST_DIMENSIONS = 2**16, 4


class Damaged(ValueError):
    """What is wrong with a file, in a few words."""


@dataclass(frozen=True)
class TensorEntry:
    """A tensor of a file: its shape, the number of its layout, where its bytes begin."""

    shape: tuple[int, ...]
    layout: int
    start: int


@dataclass(frozen=True)
class GgufFile:
    """Metadata and tensors of a file; the tensors are read when they are asked for."""

    path: Path
    metadata: dict[str, Any]
    entries: dict[str, TensorEntry]

    @classmethod
    def open(cls, path: Path | str, field: str) -> GgufFile:
        """Read the header; `field` is what an error begins with."""
        place = named_path(path, field)
        if not place.is_file():
            raise InteropError(f"{field}: {str(path)!r} is not a file; it takes a GGUF file")
        try:
            with place.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return cls(place, *_header(content))
        except (Damaged, OSError, ValueError, OverflowError) as error:
            raise InteropError(f"{field}: {str(path)!r} cannot be read as GGUF: {reason_of(error)}") from None

    def tensor(self, name: str) -> Tensor:
        """A tensor in the precision that it lies in; a quantised one in float32."""
        entry = self.entries[name]
        size = LAYOUTS[entry.layout].size_of(entry.shape)
        content = np.memmap(self.path, np.uint8, "r", entry.start, (size,)) if size else np.empty(0, np.uint8)
        return dequantise(content, entry.layout, entry.shape)

    @property
    def dtype(self) -> torch.dtype:
        """Of its widest tensor: float16 or bfloat16 where it lies so, else float32."""
        widest = max(self.entries.values(), key=lambda entry: math.prod(entry.shape))
        return LAYOUTS[widest.layout].dtype


def _header(content: mmap.mmap) -> tuple[dict[str, Any], dict[str, TensorEntry]]:
    cursor = Cursor(content)
    if cursor.take(4) != MAGIC:
        raise Damaged("it does not begin with GGUF")
    version = cursor.number("I")
    if version not in VERSIONS:
        raise Damaged(f"version {version} is not known; it takes {' or '.join(map(str, VERSIONS))}, little-endian")
    tensors, pairs = cursor.count(8 + 4 + 4 + 8), cursor.count(8 + 4 + 1)
    metadata: dict[str, Any] = {}
    for _ in range(pairs):
        name = cursor.text(LONGEST_NAME)
        if name in metadata:
            raise Damaged(f"{name[:80]!r} is twice in its metadata")
        metadata[name] = cursor.value(cursor.number("I"))
    listed = {}
    for _ in range(tensors):
        name = cursor.text(LONGEST_NAME)
        if name in listed:
            raise Damaged(f"tensor {name[:80]!r} is there twice")
        dimensions = cursor.number("I")
        if not 1 <= dimensions <= MOST_DIMENSIONS:
            raise Damaged(f"tensor {name[:80]!r} has {dimensions} dimensions; it takes 1 to {MOST_DIMENSIONS}")
        shape = tuple(reversed([cursor.number("Q") for _ in range(dimensions)]))  # theirs begin with the last
        listed[name] = (shape, cursor.number("I"), cursor.number("Q"))
    alignment = metadata.get("general.alignment", ALIGNMENT)
    if not isinstance(alignment, int) or not 0 < alignment <= 2**20:
        raise Damaged(f"general.alignment = {alignment!r} is not allowed; it takes a number from 1 to {2**20}")
    start = -(-cursor.at // alignment) * alignment
    entries = {}
    for name, (shape, layout, offset) in listed.items():
        if layout not in LAYOUTS:
            raise Damaged(f"tensor {name[:80]!r} has layout {layout}, which is not known")
        entries[name] = TensorEntry(shape, layout, start + offset)
        try:
            end = start + offset + LAYOUTS[layout].size_of(shape)
        except ValueError as error:
            raise Damaged(f"tensor {name[:80]!r}: {error}") from None
        if end > len(content):
            raise Damaged(f"tensor {name[:80]!r} ends behind the file")
    return metadata, entries


class Cursor:
    """Reads on through a header; nothing is made that the file is too short for."""

    def __init__(self, content: mmap.mmap) -> None:
        self.content, self.at = content, 0

    def take(self, size: int) -> bytes:
        """So many bytes."""
        if size > len(self.content) - self.at:
            raise Damaged("it ends within its header")
        self.at += size
        return self.content[self.at - size : self.at]

    def number(self, kind: str) -> Any:
        """A number of one of `struct`'s kinds."""
        return struct.unpack(f"<{kind}", self.take(struct.calcsize(f"<{kind}")))[0]

    def count(self, least: int) -> int:
        """A number of things that take so many bytes each, at least."""
        found = int(self.number("Q"))
        if found * least > len(self.content) - self.at:
            raise Damaged(f"it is too short for {found} entries")
        return found

    def text(self, longest: int | None = None) -> str:
        """A text after its length."""
        size = self.count(1)
        if longest is not None and size > longest:
            raise Damaged(f"a name of {size} bytes is too long")
        try:
            return self.take(size).decode("utf-8")
        except UnicodeDecodeError:
            raise Damaged("a text in its header is not UTF-8") from None

    def value(self, kind: int) -> Any:
        """A value of metadata; lists of numbers, truths and texts, but not of lists."""
        if kind == STRING:
            return self.text()
        if kind in SCALARS:
            return self.number(SCALARS[kind])
        if kind != ARRAY:
            raise Damaged(f"a value of kind {kind} is not known")
        inner = self.number("I")
        if inner == STRING:
            return [self.text() for _ in range(self.count(8))]
        if inner not in SCALARS:
            raise Damaged(f"a list of values of kind {inner} is not known")
        letter = SCALARS[inner]
        length = self.count(struct.calcsize(f"<{letter}"))
        return list(struct.unpack(f"<{length}{letter}", self.take(length * struct.calcsize(f"<{letter}"))))
