"""Parquet files and Hugging Face datasets: text in a column."""

from __future__ import annotations

import functools
import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

from siamesenorm.data.documents import Document, FileSource, Piece, Reading, Source, pieces_by_size, sound_text
from siamesenorm.data.reading import reason_of
from siamesenorm.errors import DataError, import_extra

ROWS = 1024
"""Rows read at a time."""


def check_column(place: str, field: str, columns: list[str]) -> None:
    """Raise if the text's column is missing."""
    if field not in columns:
        raise DataError(f"{place}: no column {field!r}; the columns are {', '.join(columns) or 'none'}")


def texts_of(
    values: list[object], first: int, place: str, reading: Reading, skipped: Counter[str]
) -> Iterator[Document]:
    """Documents of a column's values; the row is their place, rows without a value count as empty."""
    for row, value in enumerate(values, start=first):
        if value is None:
            skipped["empty"] += 1
            continue
        text = sound_text(value, f"{place}, row {row}", reading, skipped)
        if text is not None:
            yield Document(text, str(row))


class ParquetFile(FileSource):
    """A parquet file, read by row group."""

    kind = "parquet"

    def pieces(self, target: int, reading: Reading) -> list[Piece]:
        """Runs of row groups; their sizes are shares of the file's bytes."""
        with self._open() as file:
            check_column(self.name, reading.field, file.schema_arrow.names)
            rows = [file.metadata.row_group(number).num_rows for number in range(file.num_row_groups)]
        total = max(1, sum(rows))
        return pieces_by_size([self.size() * count // total for count in rows], target)

    def read(self, piece: Piece, reading: Reading, skipped: Counter[str]) -> Iterator[Document]:
        """The texts of a run of row groups."""
        with self._open() as file:
            row = sum(file.metadata.row_group(number).num_rows for number in range(piece.start))
            groups = list(range(piece.start, piece.stop))
            batches = file.iter_batches(batch_size=ROWS, row_groups=groups, columns=[reading.field])
            while (values := self._next(batches)) is not None:
                yield from texts_of(values, row, self.name, reading, skipped)
                row += len(values)

    def _open(self) -> Any:
        arrow = import_extra("pyarrow", "a parquet file")
        try:
            return import_extra("pyarrow.parquet", "a parquet file").ParquetFile(self.path, memory_map=True)
        except (arrow.ArrowException, OSError) as error:
            raise self._damaged(error) from None

    def _next(self, batches: Iterator[Any]) -> list[object] | None:
        arrow = import_extra("pyarrow", "a parquet file")
        try:
            batch = next(batches, None)
            return None if batch is None else batch.column(0).to_pylist()
        except (arrow.ArrowException, OSError, UnicodeDecodeError) as error:
            raise self._damaged(error) from None

    def _damaged(self, error: Exception) -> DataError:
        return DataError(f"source: {str(self.path)!r} is not a sound parquet file: {reason_of(error)}")


@dataclass(frozen=True)
class HubDataset(Source):
    """A dataset that `datasets` loads by name: from the Hugging Face hub, its cache, or a local folder."""

    name: str
    path: str
    subset: str | None
    split: str
    kind = "datasets"

    def size(self) -> int:
        """Bytes of the rows in memory."""
        return max(1, int(self._data().data.nbytes))

    def sha256(self) -> str:
        """Of the name and of the fingerprint that `datasets` gives the loaded data."""
        data = self._data()
        return hashlib.sha256(
            f"{self.name} {self.subset} {self.split} {len(data)} {data._fingerprint}".encode()
        ).hexdigest()

    def pieces(self, target: int, reading: Reading) -> list[Piece]:
        """Runs of rows, taken as equally long."""
        data = self._data()
        check_column(self.name, reading.field, list(data.column_names))
        size, rows = self.size(), len(data)
        count = max(1, min(rows, round(size / target)))
        edges = [rows * number // count for number in range(count + 1)]
        return [Piece(a, b, size * (b - a) // rows) for a, b in pairwise(edges) if b > a]

    def read(self, piece: Piece, reading: Reading, skipped: Counter[str]) -> Iterator[Document]:
        """The texts of a run of rows."""
        data = self._data()
        for start in range(piece.start, piece.stop, ROWS):
            values = list(data[start : min(start + ROWS, piece.stop)][reading.field])
            yield from texts_of(values, start, self.name, reading, skipped)

    def _data(self) -> Any:
        return load_rows(self.path, self.subset, self.split)


@functools.lru_cache(maxsize=4)
def load_rows(path: str, subset: str | None, split: str) -> Any:
    """One split of a dataset that `datasets` loads by name."""
    datasets = import_extra("datasets", "a Hugging Face dataset")
    try:
        data = datasets.load_dataset(path, subset, split=split)
    except Exception as error:  # the library raises many kinds; its first line says what is wrong
        reason = str(error).strip().splitlines()[0][:300] if str(error).strip() else type(error).__name__
        raise DataError(
            f"source: 'hf:{path}' (subset {subset!r}, split {split!r}) cannot be loaded: {reason}"
        ) from None
    if not isinstance(data, datasets.Dataset):
        raise DataError(f"split: {split!r} of 'hf:{path}' is not one table of rows; name a single split such as train")
    return data
