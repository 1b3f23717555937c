"""Token arrays on disk as one long sequence, memory-mapped: a terabyte costs no memory until it is read.

tokens = open_tokens("corpus", split="train")             # a prepared folder
tokens = open_tokens("part-0-00000.npy", eos_id=50279)    # OLMo's raw arrays, a file or a folder of them
tokens.read(0, 2048)
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from siamesenorm.data.arrays import array_header
from siamesenorm.data.files import LOOK, looks_like_text
from siamesenorm.data.index import INDEX, PROGRESS, read_index
from siamesenorm.data.listing import files_below
from siamesenorm.data.reading import named_path
from siamesenorm.data.tokenizer import TokenIds, Tokenizer
from siamesenorm.errors import DataError

DTYPES: dict[str, np.dtype[np.unsignedinteger[Any]]] = {"uint16": np.dtype("<u2"), "uint32": np.dtype("<u4")}
ARRAYS = (".npy", ".bin")
"""Ends of the names of token arrays."""
NUMPY_HEADER = b"\x93NUMPY"
SCORED, STARTS = 1, 2
"""Marks of a token: it is learnt; it is the first of a document."""
OPEN_FILES = 256
"""Shards that stay mapped; each keeps a file open, and a system allows about a thousand."""


@dataclass(frozen=True)
class RawArray:
    """A file of ids: a raw array, or one with NumPy's own header before it."""

    path: Path
    dtype: np.dtype[np.unsignedinteger[Any]]
    count: int
    offset: int = 0

    def map(self) -> TokenIds:
        """The ids, read only and only when touched."""
        return np.asarray(np.memmap(self.path, self.dtype, mode="r", offset=self.offset, shape=(self.count,)))


class Tokens:
    """Arrays of ids one after another as a single sequence.

    name: said in errors.
    eos_id: ends a document; None if unknown.
    vocab_size: ids stay below it; None if unknown.
    fingerprint: the tokenizer's, None if unknown.
    marks: of every token, `SCORED` and `STARTS`; None: all are learnt, and documents end with `eos_id`.
    """

    note = ""
    """What is to be said of it when training begins."""

    def __init__(
        self,
        parts: Sequence[RawArray | TokenIds],
        *,
        name: str,
        eos_id: int | None = None,
        vocab_size: int | None = None,
        fingerprint: str | None = None,
        text_bytes: int | None = None,
        marks: NDArray[np.uint8] | None = None,
    ) -> None:
        self.marks = marks
        self.name, self.eos_id, self.vocab_size = name, eos_id, vocab_size
        self.fingerprint, self.text_bytes = fingerprint, text_bytes
        counts = [part.count if isinstance(part, RawArray) else part.size for part in parts]
        self._parts = [part for part, count in zip(parts, counts, strict=True) if count]
        self._edges = np.cumsum([0, *(count for count in counts if count)], dtype=np.int64)
        self._mapped: OrderedDict[int, TokenIds] = OrderedDict()
        kinds = {part.dtype for part in self._parts}
        self.dtype = np.dtype("<u4") if np.dtype("<u4") in kinds else np.dtype("<u2")

    @classmethod
    def encoded(cls, tokenizer: Tokenizer, parts: Sequence[TokenIds], name: str, **more: Any) -> Tokens:
        """Ids in memory that a tokenizer has made; more: `text_bytes`, `marks`."""
        eos, size = tokenizer.eos_id, tokenizer.vocab_size
        return cls(parts, name=name, eos_id=eos, vocab_size=size, fingerprint=tokenizer.fingerprint, **more)

    def __len__(self) -> int:
        return int(self._edges[-1])

    def read(self, start: int, stop: int) -> TokenIds:
        """Ids from start to stop, across the borders of files."""
        return self.gather(np.array([start]), stop - start)[0]

    def gather(self, starts: NDArray[np.int64], length: int) -> TokenIds:
        """A row of `length` ids from each start."""
        if starts.size and (starts.min() < 0 or int(starts.max()) + length > len(self)):
            raise IndexError(f"{self.name}: tokens {starts.min()} to {starts.max() + length} of {len(self)}")
        rows = np.empty((starts.size, length), dtype=self.dtype)
        if not rows.size:
            return rows
        numbers = np.searchsorted(self._edges, starts, side="right") - 1
        begins = starts - self._edges[numbers]
        left = self._edges[numbers + 1] - starts
        for row, number, begin, room in zip(rows, numbers.tolist(), begins.tolist(), left.tolist(), strict=True):
            if length <= room:
                row[:] = self._part(number)[begin : begin + length]
            else:
                self._across(row, number, begin)
        if self.vocab_size is not None and rows.max() >= self.vocab_size:
            raise DataError(f"data: {self.name!r} holds id {rows.max()}; its vocabulary has 0 to {self.vocab_size - 1}")
        return rows

    def gather_marks(self, starts: NDArray[np.int64], length: int) -> NDArray[np.uint8] | None:
        """The marks of what `gather` gives; None where there are none."""
        return None if self.marks is None else self.marks[starts[:, None] + np.arange(length)]

    def _across(self, row: TokenIds, number: int, begin: int) -> None:
        done = 0
        while done < row.size:
            piece = self._part(number)[begin : begin + row.size - done]
            row[done : done + piece.size] = piece
            done, number, begin = done + piece.size, number + 1, 0

    def _part(self, number: int) -> TokenIds:
        part = self._parts[number]
        if not isinstance(part, RawArray):
            return part
        mapped = self._mapped.get(number)
        if mapped is None:
            mapped = self._mapped[number] = part.map()
            if len(self._mapped) > OPEN_FILES:
                self._mapped.popitem(last=False)
        return mapped


def open_tokens(
    data: str | Path | Sequence[str | Path],
    *,
    split: str = "train",
    dtype: str = "uint16",
    eos_id: int | None = None,
    vocab_size: int | None = None,
) -> Tokens:
    """The tokens of a prepared folder, or of raw ``.npy`` arrays as OLMo has them: files, or folders of them.

    split: of a prepared folder.
    dtype, eos_id, vocab_size: of raw arrays, which do not say it themselves.
    """
    paths = [named_path(part, "data") for part in ([data] if isinstance(data, (str, Path)) else data)]
    if len(paths) == 1 and ((paths[0] / INDEX).is_file() or (paths[0] / PROGRESS).is_dir()):
        return _prepared(paths[0], split)
    if dtype not in DTYPES:
        raise DataError.not_allowed("dtype", dtype, ", ".join(DTYPES))
    files = [file for path in paths for file in _raw_files(path)]
    name = str(paths[0]) if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1} more"
    return Tokens([_raw(file, dtype) for file in files], name=name, eos_id=eos_id, vocab_size=vocab_size)


def tokens_in_memory(texts: Iterable[str], tokenizer: Tokenizer, name: str) -> Tokens:
    """Tokens of texts, held in memory: for small corpora such as the embedded ones."""
    held = list(texts)
    if not held:
        raise DataError(f"data: {name!r} holds no document")
    flat, _ = tokenizer.encode_documents(held)
    return Tokens.encoded(tokenizer, [flat], name, text_bytes=sum(len(text.encode()) for text in held))


def _prepared(folder: Path, split: str) -> Tokens:
    index = read_index(folder)
    if split not in index.splits:
        raise DataError.refused("split", split, f"{str(folder)!r} has {', '.join(index.splits)}")
    found = index.splits[split]
    dtype = DTYPES[index.dtype]
    for shard in found.shards:
        path = folder / shard.file
        size = path.stat().st_size if path.exists() else -1
        if size != shard.tokens * dtype.itemsize:
            what = "is missing" if size < 0 else f"has {size} bytes instead of {shard.tokens * dtype.itemsize}"
            raise DataError(f"data: {str(path)!r} {what}; prepare the folder again to mend it")
    return Tokens(
        [RawArray(folder / shard.file, dtype, shard.tokens) for shard in found.shards],
        name=f"{folder} ({split})",
        eos_id=index.tokenizer.eos_id,
        vocab_size=index.tokenizer.vocab_size,
        fingerprint=index.tokenizer.fingerprint,
        text_bytes=found.text_bytes,
    )


def _raw_files(path: Path) -> list[Path]:
    if path.is_file():
        return [path]
    found = [file for file in files_below(path) if file.suffix == ".npy"] if path.is_dir() else []
    if not found:
        raise DataError(
            f"data: {str(path)!r} is neither a prepared folder, nor a .npy file, nor a folder of .npy files"
        )
    return found


def _raw(path: Path, dtype: str) -> RawArray:
    with open(path, "rb") as file:
        if file.read(len(NUMPY_HEADER)) == NUMPY_HEADER:
            return _with_header(path)
    size, kind = path.stat().st_size, DTYPES[dtype]
    if size >= LOOK and looks_like_text(path):
        raise DataError(
            f"data: {str(path)!r} is no array of {dtype} tokens but looks like text; "
            f"siamesenorm data prepare makes tokens of it"
        )
    if size == 0 or size % kind.itemsize:
        raise DataError(f"data: {str(path)!r} has {size} bytes, which is no whole number of {dtype} tokens")
    return RawArray(path, kind, size // kind.itemsize)


def _with_header(path: Path) -> RawArray:
    shape, dtype, _, offset = array_header(path, "data")
    if len(shape) != 1 or dtype not in DTYPES.values():
        raise DataError(f"data: {str(path)!r} is {dtype} of shape {shape}; allowed is one row of uint16 or uint32")
    return RawArray(path, dtype, shape[0], offset)
