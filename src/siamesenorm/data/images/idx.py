"""IDX files as MNIST and its kin come in: ``train-images-idx3-ubyte`` beside ``train-labels-idx1-ubyte``, also .gz.

Plain files are mapped into memory; gzipped ones are unpacked into it.
"""

from __future__ import annotations

import gzip
import math
import re
import zlib
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from siamesenorm.data.images.imageset import ArrayImages
from siamesenorm.errors import DataError

NAMES = {"train": ("train",), "test": ("t10k", "test")}
LARGEST = 2**36
"""Bytes of one file beyond which a header is damaged."""
FASHION = ("t-shirt/top", "trouser", "pullover", "dress", "coat", "sandal", "shirt", "sneaker", "bag", "ankle boot")


def idx_file(folder: Path, split: str, kind: str) -> Path | None:
    """The file of a split's images or labels, under any of the common spellings."""
    stems = "|".join(NAMES[split])
    pattern = re.compile(rf"({stems})-{kind}[-.]idx\d-ubyte(\.gz)?", re.IGNORECASE)
    return next((path for path in sorted(folder.iterdir()) if pattern.fullmatch(path.name)), None)


def read_idx(path: Path) -> NDArray[np.uint8]:
    """The array of an IDX file of bytes."""
    try:
        packed = path.suffix == ".gz"
        with gzip.open(path) if packed else open(path, "rb") as file:
            head = file.read(4)
            shape = _shape(path, head, file.read(4 * head[3]) if len(head) == 4 else b"")
            data = file.read(math.prod(shape) + 1) if packed else b""
        offset = 4 + 4 * len(shape)
        _check_size(path, shape, len(data) if packed else path.stat().st_size - offset)
        if packed:
            return np.frombuffer(data, dtype=np.uint8).reshape(shape)
        return np.memmap(path, dtype=np.uint8, mode="r", offset=offset, shape=shape)
    except (OSError, EOFError, zlib.error) as error:
        raise DataError.failed("images", path, "read", error) from None


def _shape(path: Path, head: bytes, sizes: bytes) -> tuple[int, ...]:
    if len(head) != 4 or head[:3] != b"\0\0\x08" or not 1 <= head[3] <= 4 or len(sizes) != 4 * head[3]:
        raise DataError(f"images: {str(path)!r} is no IDX file of bytes; its first bytes are {head.hex(' ') or 'none'}")
    shape = tuple(int(size) for size in np.frombuffer(sizes, dtype=">u4"))
    if not 0 < math.prod(shape) <= LARGEST:
        raise DataError(f"images: {str(path)!r} is damaged; its header says {' × '.join(map(str, shape))} bytes")
    return shape


def _check_size(path: Path, shape: tuple[int, ...], size: int) -> None:
    if size != math.prod(shape):
        has = "more" if size > math.prod(shape) else f"{size}"
        raise DataError(
            f"images: {str(path)!r} is damaged; its header says {' × '.join(map(str, shape))} bytes and it has {has}"
        )


def open_idx(folder: Path, split: str, class_names: tuple[str, ...] | None = None) -> ArrayImages:
    """A split of a folder of IDX files; classes are named by their numbers unless names are given."""
    found = {kind: idx_file(folder, split, kind) for kind in ("images", "labels")}
    for kind, path in found.items():
        if path is None:
            missing = f"{NAMES[split][0]}-{kind}-idx{3 if kind == 'images' else 1}-ubyte"
            raise DataError(f"images: folder {str(folder)!r} has no {missing}")
    assert found["images"] is not None
    assert found["labels"] is not None
    images, labels = read_idx(found["images"]), read_idx(found["labels"]).astype(np.int64)
    if images.ndim not in (3, 4) or (images.ndim == 4 and images.shape[3] not in (1, 3)):
        raise DataError(f"images: {str(found['images'])!r} has {images.ndim} dimensions; images take 3")
    if labels.shape != images.shape[:1]:
        raise DataError(f"images: {str(folder)!r} has {images.shape[0]} images and {labels.size} labels in {split}")
    pixels = images[..., None] if images.ndim == 3 else images
    count = int(labels.max()) + 1
    if class_names is None:
        class_names = tuple(str(number) for number in range(max(count, 10)))
    return ArrayImages(f"{folder.name} ({split})", pixels, labels, class_names)
