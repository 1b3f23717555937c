"""From the documents of a chunk to its shards: a raw array of tokens a split, in OLMo's layout.

A shard is ``train-00012.npy``: little-endian uint16 or uint32 ids without a header, every document ended by the
end-of-document id. ``train-00012.csv.gz`` beside it has a line ``start,end,id,source,place`` for every document.
"""

from __future__ import annotations

import contextlib
import csv
import gzip
import hashlib
import io
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from siamesenorm.data.atomic import sha256_of, whole_file, write_json
from siamesenorm.data.documents import SPLITS, Piece, Reading, Source
from siamesenorm.data.held_out import split_document
from siamesenorm.data.index import PROGRESS, IndexPart, Shard
from siamesenorm.data.tokenizer import Tokenizer

BATCH = 1 << 22
"""Bytes of text that are encoded at a time."""

ChunkProgress = Callable[[int, int], None]
"""Called with the bytes of text read and the tokens made since the last call."""


class ChunkRecord(IndexPart):
    """What a finished chunk has written: the unit of resuming."""

    number: int
    plan: str
    skipped: dict[str, int]
    shards: dict[str, Shard]


@dataclass(frozen=True)
class Chunk:
    """Pieces of sources, by the source's number, that become one shard per split."""

    number: int
    pieces: tuple[tuple[int, Piece], ...]

    @property
    def size(self) -> int:
        """Bytes of its pieces."""
        return sum(piece.size for _, piece in self.pieces)


@dataclass(frozen=True)
class Work:
    """All that a worker needs to know."""

    folder: Path
    plan: str
    sources: Sequence[Source]
    reading: Reading


class TokenShardWriter:
    """Writes one shard; it takes its name when it is closed, and there is none if nothing was added."""

    def __init__(self, folder: Path, split: str, number: int) -> None:
        self.path = folder / f"{split}-{number:05d}.npy"
        self.boundaries = folder / f"{split}-{number:05d}.csv.gz"
        self.tokens = self.documents = self.text_bytes = 0
        self._digest = hashlib.sha256()
        self._stack = contextlib.ExitStack()
        self._open = False

    def __enter__(self) -> TokenShardWriter:
        return self

    def __exit__(self, *error: object) -> None:
        self._stack.__exit__(*error)  # type: ignore[arg-type]

    def add(self, tokenizer: Tokenizer, texts: list[str], rows: list[tuple[str, str, str]], text_bytes: int) -> int:
        """Encode and write documents; the number of their tokens."""
        if not self._open:
            self._open = True
            self._file = self._stack.enter_context(whole_file(self.path))
            packed = self._stack.enter_context(whole_file(self.boundaries))
            # no name and no time in the header: equal rows give equal bytes
            unpacked = self._stack.enter_context(gzip.GzipFile("", "wb", 6, packed, mtime=0))
            lines = self._stack.enter_context(io.TextIOWrapper(unpacked, "utf-8", newline=""))
            self._rows = csv.writer(lines, lineterminator="\n")
        flat, lengths = tokenizer.encode_documents(texts)
        raw = flat.tobytes()
        self._file.write(raw)
        self._digest.update(raw)
        ends = (self.tokens + np.cumsum(lengths)).tolist()
        starts = [self.tokens, *ends[:-1]]
        self._rows.writerows((start, end, *row) for start, end, row in zip(starts, ends, rows, strict=True))
        self.tokens += flat.size
        self.documents += len(texts)
        self.text_bytes += text_bytes
        return flat.size

    def shard(self) -> Shard | None:
        """The closed shard, if anything was added."""
        if not self._open:
            return None
        return Shard(
            file=self.path.name,
            tokens=self.tokens,
            documents=self.documents,
            text_bytes=self.text_bytes,
            sha256=self._digest.hexdigest(),
            boundaries=self.boundaries.name,
            boundaries_sha256=sha256_of(self.boundaries),
        )


def write_chunk(work: Work, tokenizer: Tokenizer, chunk: Chunk, progress: ChunkProgress) -> ChunkRecord:
    """Write the shards of a chunk, then the record that they are finished."""
    skipped: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        writers = {split: stack.enter_context(TokenShardWriter(work.folder, split, chunk.number)) for split in SPLITS}
        for batch in _batches(work, chunk, skipped, progress):
            for split, (texts, rows, size) in batch.items():
                progress(0, writers[split].add(tokenizer, texts, rows, size))
    shards = {split: shard for split, writer in writers.items() if (shard := writer.shard())}
    record = ChunkRecord(number=chunk.number, plan=work.plan, skipped=dict(sorted(skipped.items())), shards=shards)
    write_json(record_path(work.folder, chunk.number), record.model_dump())
    return record


def record_path(folder: Path, number: int) -> Path:
    """Where the record of a chunk lies until the index is written."""
    return folder / PROGRESS / f"{number:05d}.json"


SplitBatch = tuple[list[str], list[tuple[str, str, str]], int]


def _batches(
    work: Work, chunk: Chunk, skipped: Counter[str], progress: ChunkProgress
) -> Iterator[dict[str, SplitBatch]]:
    """Documents by split, about `BATCH` bytes at a time."""
    texts: dict[str, list[str]] = {split: [] for split in SPLITS}
    rows: dict[str, list[tuple[str, str, str]]] = {split: [] for split in SPLITS}
    sizes: Counter[str] = Counter()
    for number, piece in chunk.pieces:
        source = work.sources[number]
        reported = held = 0
        for document in source.read(piece, work.reading, skipped):
            raw = document.text.encode()
            held += len(raw)
            if not raw or raw.isspace():
                skipped["empty"] += 1
                continue
            for part in split_document(document, work.reading):
                assert part.split is not None
                texts[part.split].append(part.text)
                rows[part.split].append(("", source.name, part.place))
                sizes[part.split] += len(part.text.encode())
            if sizes.total() >= BATCH:
                # a piece is counted whole in the end, so a packed or tagged source never counts beyond its bytes
                progress(min(held, piece.size) - reported, 0)
                reported = min(held, piece.size)
                yield {split: (texts[split], rows[split], sizes[split]) for split in SPLITS if texts[split]}
                texts, rows = {split: [] for split in SPLITS}, {split: [] for split in SPLITS}
                sizes.clear()
        progress(piece.size - reported, 0)
    yield {split: (texts[split], rows[split], sizes[split]) for split in SPLITS if texts[split]}
