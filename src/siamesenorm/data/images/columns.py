"""Images in a column: parquet files as the Hugging Face hub has them, and datasets by name (extra: data)."""

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from siamesenorm.data.atomic import sha256_of
from siamesenorm.data.columns import check_column, load_rows
from siamesenorm.data.images.image_files import decode
from siamesenorm.data.images.imageset import ImageSet, Pixels
from siamesenorm.data.reading import parse_json, reason_of
from siamesenorm.errors import DataError, import_extra

IMAGE_COLUMNS, LABEL_COLUMNS = ("image", "img", "jpg", "png"), ("label", "labels", "fine_label", "class", "cls")


class ColumnImages(ImageSet):
    """Encoded images of a table; classes are whole numbers, or texts in the order of the alphabet."""

    def __init__(
        self,
        name: str,
        row: Callable[[int], Any],
        labels: Sequence[Any],
        digest: str,
        *,
        names: Sequence[str] | None = None,
        class_names: tuple[str, ...] | None = None,
        channels: int = 3,
    ) -> None:
        self.name, self.channels, self._row, self._digest = name, channels, row, digest
        if any(label is None for label in labels) or not len(labels):
            raise DataError(f"images: {name!r} has {'rows without a label' if len(labels) else 'no rows'}")
        if isinstance(labels[0], str):
            self.class_names = class_names or tuple(sorted(set(labels)))
            numbers = {text: number for number, text in enumerate(self.class_names)}
            unknown = next((label for label in labels if label not in numbers), None)
            if unknown is not None:
                raise DataError(f"images: class {unknown!r} of {name!r} is not among those of the training images")
            self.labels = np.array([numbers[label] for label in labels], dtype=np.int64)
        else:
            self.labels = np.array(labels, dtype=np.int64)
            count = int(self.labels.max()) + 1
            self.class_names = class_names or tuple(names or (str(number) for number in range(count)))
        if int(self.labels.min()) < 0 or int(self.labels.max()) >= len(self.class_names):
            raise DataError(f"images: {name!r} has labels beyond its {len(self.class_names)} classes")

    def __getitem__(self, number: int) -> Pixels:
        value = self._row(number)
        content = value.get("bytes") if isinstance(value, dict) else value
        if not isinstance(content, bytes):
            raise DataError(f"images: row {number} of {self.name!r} holds no image; it takes the bytes of a file")
        return decode(content, f"{self.name}, row {number}", self.channels)

    def _fingerprint(self) -> str:
        return hashlib.sha256(f"{self._digest} {self.class_names}".encode()).hexdigest()


def _choose(place: str, names: list[str], wanted: str | None, customary: Sequence[str]) -> str:
    if wanted is None:
        wanted = next((name for name in customary if name in names), customary[0])
    check_column(place, wanted, names)
    return wanted


def open_parquet(paths: Sequence[Path], name: str, column: str | None, label: str | None, **options: Any) -> ImageSet:
    """The rows of parquet files, one file after another; the files stay mapped."""
    parquet = import_extra("pyarrow.parquet", "a parquet file")
    arrow = import_extra("pyarrow", "a parquet file")
    try:
        schema = parquet.read_schema(paths[0])
        image = _choose(name, schema.names, column, IMAGE_COLUMNS)
        classes = _choose(name, schema.names, label, LABEL_COLUMNS)
        table = arrow.concat_tables(
            [parquet.read_table(path, columns=[image, classes], memory_map=True) for path in paths]
        )
    except (arrow.ArrowException, OSError) as error:
        raise DataError(f"images: {name!r} is not a sound parquet file: {reason_of(error)}") from None
    pixels = table.column(image)
    digest = hashlib.sha256("".join(map(sha256_of, paths)).encode()).hexdigest()
    labels = table.column(classes).to_pylist()
    row = functools.partial(_arrow_row, pixels)  # workers may have to be sent it
    return ColumnImages(name, row, labels, digest, names=_names_in(schema, classes), **options)


def _arrow_row(column: Any, number: int) -> Any:
    return column[number].as_py()


def _names_in(schema: Any, column: str) -> list[str] | None:
    """Names of classes that `datasets` has left in a parquet file's header."""
    try:
        features = parse_json(schema.metadata[b"huggingface"], strict=False)["info"]["features"]
        names = features[column]["names"]
    except (TypeError, KeyError, ValueError):
        return None
    return [str(name) for name in names] if isinstance(names, list) else None


def open_dataset(source: str, split: str, column: str | None, label: str | None, **options: Any) -> ImageSet:
    """A dataset that `datasets` loads by name, ``NAME`` or ``NAME:SUBSET``."""
    path, _, subset = source.partition(":")
    rows = load_rows(path, subset or None, split)
    image = _choose(source, list(rows.column_names), column, IMAGE_COLUMNS)
    classes = _choose(source, list(rows.column_names), label, LABEL_COLUMNS)
    names = getattr(rows.features[classes], "names", None)
    datasets = import_extra("datasets", "a Hugging Face dataset")
    encoded = rows.cast_column(image, datasets.Image(decode=False))
    digest = f"{source} {split} {len(rows)} {rows._fingerprint}"
    row = functools.partial(_dataset_row, encoded, image)
    return ColumnImages(f"{source} ({split})", row, list(rows[classes]), digest, names=names, **options)


def _dataset_row(rows: Any, column: str, number: int) -> Any:
    return rows[number][column]
