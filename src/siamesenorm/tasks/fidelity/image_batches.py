"""Pictures to be judged: a folder of image files or an .npz as ADM writes them, a batch at a time.

pictures = open_pictures("samples.npz")
for batch in pictures.batches(64):             # uint8 (images, height, width, channels)
    ...
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from siamesenorm.data.arrays import array_names, open_member, read_arrays, take
from siamesenorm.data.atomic import sha256_of
from siamesenorm.data.images import ImageSet
from siamesenorm.data.images.image_files import ENDINGS, decode
from siamesenorm.data.images.image_folder import folder_name
from siamesenorm.data.listing import files_below
from siamesenorm.data.reading import named_path
from siamesenorm.errors import DataError

Images = NDArray[np.uint8]
"""(images, height, width, channels)."""
ARRAY, LABELS = "arr_0", "arr_1"


@dataclass(frozen=True)
class Pictures:
    """Some pictures, wherever they lie."""

    count: int
    batches: Callable[[int], Iterator[Images]]
    """Batches of at most so many; pictures of different sizes come in different batches."""
    fingerprint: Callable[[], str]
    """SHA-256 of what was read."""
    labels: Callable[[Sequence[str]], NDArray[np.int64] | None] = lambda class_names: None
    """The class that every picture was asked for, where file or folders say so."""


def open_pictures(source: str | Path) -> Pictures:
    """The pictures of a folder, its sub-folders included, or of an .npz whose arr_0 is uint8 (images, H, W, 3)."""
    path = named_path(source, "pictures")
    if path.is_dir():
        return _folder(path)
    if path.is_file() and path.suffix.lower() == ".npz":
        return _archive(path)
    raise DataError.not_allowed("pictures", str(source), f"a folder of images or an .npz with an array {ARRAY}")


def has_pictures(path: Path) -> bool:
    """Whether image files lie in a folder or below it, or an array of images in an .npz."""
    if path.is_dir():
        return any(file.suffix.lower() in ENDINGS for file in files_below(path))
    return ARRAY in array_names(path)


def of_array(images: Images) -> Pictures:
    """Pictures that are in memory."""

    def batches(size: int) -> Iterator[Images]:
        return (images[start : start + size] for start in range(0, len(images), size))

    return Pictures(len(images), batches, lambda: hashlib.sha256(np.ascontiguousarray(images).tobytes()).hexdigest())


def of_image_set(images: ImageSet) -> Pictures:
    """The pictures of a labelled set."""
    return Pictures(
        len(images),
        lambda size: _batched((images[number] for number in range(len(images))), size),
        lambda: images.fingerprint,
    )


def _batched(images: Iterable[Images], size: int) -> Iterator[Images]:
    batch: list[Images] = []
    for image in images:
        if batch and (len(batch) == size or image.shape != batch[0].shape):
            yield np.stack(batch)
            batch = []
        batch.append(image)
    if batch:
        yield np.stack(batch)


def _folder(root: Path) -> Pictures:
    files = [path for path in files_below(root) if path.suffix.lower() in ENDINGS]
    if not files:
        raise DataError(f"pictures: {str(root)!r} holds no images; it takes files such as {', '.join(ENDINGS)}")

    def fingerprint() -> str:
        digest = hashlib.sha256()
        for path in files:
            digest.update(f"{path.relative_to(root).as_posix()} {sha256_of(path)}\n".encode())
        return digest.hexdigest()

    def labels(class_names: Sequence[str]) -> NDArray[np.int64] | None:
        folders, names = [path.parent.name for path in files], [folder_name(name) for name in class_names]
        known = set(folders) <= set(names)
        return np.array([names.index(name) for name in folders], dtype=np.int64) if known else None

    return Pictures(
        len(files), lambda size: _batched((decode(path, str(path)) for path in files), size), fingerprint, labels
    )


def _archive(path: Path) -> Pictures:
    shape = _shape(path)

    def batches(size: int) -> Iterator[Images]:
        with open_member(path, ARRAY, "pictures") as (file, _):
            for start in range(0, shape[0], size):
                part = (min(size, shape[0] - start), *shape[1:])
                yield np.frombuffer(take(file, math.prod(part)), np.uint8).reshape(part)

    def labels(class_names: Sequence[str]) -> NDArray[np.int64] | None:
        found = read_arrays(path, (LABELS,), "pictures").get(LABELS, np.empty(0))
        fits = found.dtype.kind in "iu" and found.shape == shape[:1]
        return found.astype(np.int64) if fits else None

    return Pictures(shape[0], batches, lambda: sha256_of(path), labels)


def _shape(path: Path) -> tuple[int, ...]:
    """The shape of the array, of which nothing but the header is read."""
    if ARRAY not in array_names(path):
        raise DataError(f"pictures: {str(path)!r} has no array {ARRAY}; it takes an .npz as ADM writes it")
    with open_member(path, ARRAY, "pictures") as (_, header):
        shape, dtype, by_columns, _ = header
    if dtype != np.uint8 or by_columns or len(shape) != 4 or shape[-1] not in (1, 3) or not math.prod(shape):
        raise DataError(
            f"pictures: the array {ARRAY} of {str(path)!r} is {dtype} {shape}; it takes uint8 (images, H, W, 3)"
        )
    return shape
