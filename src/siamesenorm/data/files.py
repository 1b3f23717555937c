"""Text and JSONL files, plain or gzipped, as sources; large ones are read from the middle by line."""

from __future__ import annotations

import gzip
import json
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import BinaryIO, cast

from siamesenorm.data.atomic import BLOCK
from siamesenorm.data.documents import Document, FileSource, Piece, Reading, decode_text, refuse, sound_text
from siamesenorm.data.reading import parse_json
from siamesenorm.errors import DataError

BOM = b"\xef\xbb\xbf"
LOOK = 4096
"""Bytes of a file that tell whether it is text."""


class DocumentFile(FileSource):
    """A file of documents."""

    @property
    def packed(self) -> bool:
        """Whether it is gzipped, so that reading starts at the beginning."""
        return self.path.suffix == ".gz"

    def pieces(self, target: int, reading: Reading) -> list[Piece]:
        """Stretches of bytes: a line or paragraph belongs to the stretch that it starts in."""
        size = self.size()
        if size == 0:
            return []
        if self.packed or not self.divisible(reading):
            return [Piece(0, size, size)]
        count = max(1, round(size / target))
        edges = [size * number // count for number in range(count + 1)]
        return [Piece(a, b, b - a) for a, b in pairwise(edges)]

    def divisible(self, reading: Reading) -> bool:
        """Whether it holds many documents."""
        return True

    def open(self) -> BinaryIO:
        """The unpacked bytes."""
        try:
            return cast(BinaryIO, gzip.open(self.path)) if self.packed else open(self.path, "rb")
        except OSError as error:
            raise DataError.failed("source", self.path, "read", error) from None

    def lines(self, piece: Piece) -> Iterator[tuple[int, bytes]]:
        """Offset and bytes of the lines that start in a piece."""
        with self.open() as file:
            offset = piece.start
            if piece.start:
                file.seek(piece.start - 1)
                offset += len(file.readline()) - 1
            while self.packed or offset < piece.stop:
                line = self.guarded(file.readline)
                if not line:
                    return
                yield offset, line
                offset += len(line)

    def guarded(self, read: Callable[[], bytes]) -> bytes:
        """What a read gives; a damaged file is said in one sentence."""
        try:
            return read()
        except (EOFError, gzip.BadGzipFile, zlib.error) as error:
            raise DataError(f"source: {str(self.path)!r} is a damaged gzip file: {error}") from None

    def line_number(self, offset: int) -> int:
        """The line at an offset, counted from 1; read from the start, so only for messages."""
        with self.open() as file:
            count, left = 1, offset
            while left and (block := file.read(min(BLOCK, left))):
                count += block.count(b"\n")
                left -= len(block)
        return count


def looks_like_text(path: Path) -> bool:
    """Whether the start of a file has no zero byte: arrays of tokens are full of them, text has none."""
    with open(path, "rb") as file:
        start = file.read(LOOK)
    return bool(start) and b"\0" not in start


@dataclass(frozen=True)
class LinePlace:
    """Where a line stands; its number is counted only if the place is said."""

    file: DocumentFile
    offset: int

    def __str__(self) -> str:
        return f"{self.file.name}, line {self.file.line_number(self.offset)}"


class TextFile(DocumentFile):
    """Plain text: the file, a line or a paragraph (up to an empty line) is one document."""

    kind = "text"

    def divisible(self, reading: Reading) -> bool:
        """By line or paragraph it holds many documents."""
        return reading.unit != "file"

    def read(self, piece: Piece, reading: Reading, skipped: Counter[str]) -> Iterator[Document]:
        """The file's text, or the lines or paragraphs that start in the piece."""
        for offset, raw in self._units(piece, reading):
            place = LinePlace(self, offset) if offset else self.name
            text = decode_text(raw.removeprefix(BOM) if offset == 0 else raw, place, reading, skipped)
            if text is not None:
                yield Document(text, str(offset))

    def _units(self, piece: Piece, reading: Reading) -> Iterator[tuple[int, bytes]]:
        if reading.unit == "file":
            with self.open() as file:
                yield 0, self.guarded(file.read)
        elif reading.unit == "line":
            for offset, line in self.lines(piece):
                yield offset, line.rstrip(b"\r\n")
        else:
            yield from self._paragraphs(piece)

    def _paragraphs(self, piece: Piece) -> Iterator[tuple[int, bytes]]:
        """A paragraph starts at a line with text after an empty line; its lines may reach beyond the piece."""
        held: list[bytes] = []
        start = 0
        inside = piece.start > 0 and not self._blank_before(piece)
        for offset, line in self.lines(Piece(piece.start, self.size(), 0)):
            blank = not line.strip(b"\r\n")
            if blank or not held:
                if held:
                    yield start, b"".join(held).rstrip(b"\r\n")
                    held = []
                if offset >= piece.stop and not self.packed:
                    return
                if blank:
                    inside = False
                elif not inside:
                    start, held = offset, [line]
            else:
                held.append(line)
        if held:
            yield start, b"".join(held).rstrip(b"\r\n")

    def _blank_before(self, piece: Piece) -> bool:
        """Whether the first line that starts in a piece follows an empty one."""
        first = next(self.lines(piece), None)
        if first is None:
            return True
        with self.open() as file:
            file.seek(max(0, first[0] - 3))
            before = file.read(min(3, first[0]))
        # the file's start counts as the end of a line
        return (before if first[0] > 3 else b"\n" + before).endswith((b"\n\n", b"\n\r\n"))


class JsonLinesFile(DocumentFile):
    """One JSON object a line, with the text in one field."""

    kind = "jsonl"

    def read(self, piece: Piece, reading: Reading, skipped: Counter[str]) -> Iterator[Document]:
        """The texts of the lines that start in the piece."""
        for offset, line in self.lines(piece):
            if offset == 0:
                line = line.removeprefix(BOM)
            if line.isspace():
                continue
            text = self._text(LinePlace(self, offset), line, reading, skipped)
            if text is not None:
                yield Document(text, str(offset))

    def _text(self, place: LinePlace, line: bytes, reading: Reading, skipped: Counter[str]) -> str | None:
        decoded = decode_text(line, place, reading, skipped)
        if decoded is None:
            return None
        try:
            value = parse_json(decoded, strict=False)
        except ValueError as error:
            reason = error.msg if isinstance(error, json.JSONDecodeError) else "a number or nest is too large"
            return refuse(place, f"not valid JSON ({reason}); allowed is one JSON object a line", reading, skipped)
        if not isinstance(value, dict):
            return refuse(place, f"{decoded[:40]!r} is not a JSON object; allowed is one per line", reading, skipped)
        if reading.field not in value:
            fields = ", ".join(value) or "none"
            return refuse(place, f"no field {reading.field!r}; the fields are {fields}", reading, skipped)
        return sound_text(value[reading.field], place, reading, skipped)
