"""CIFAR-10 and CIFAR-100 in their binary version: records of one or two label bytes and 3072 bytes of colour planes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import numpy as np

from siamesenorm.data.atomic import sha256_of
from siamesenorm.data.images.imageset import ImageSet, Pixels, check_labels
from siamesenorm.data.reading import read_text
from siamesenorm.errors import DataError

SIDE = 32
PLANES = 3 * SIDE * SIDE
FILES: dict[int, dict[str, tuple[str, ...]]] = {
    10: {"train": tuple(f"data_batch_{n}.bin" for n in range(1, 6)), "test": ("test_batch.bin",)},
    100: {"train": ("train.bin",), "test": ("test.bin",)},
}
NAMES = {10: "batches.meta.txt", 100: "fine_label_names.txt"}
INNER = ("cifar-10-batches-bin", "cifar-100-binary")
"""Folders that the archives unpack to."""


def find_cifar(folder: Path) -> tuple[Path, int] | None:
    """The folder of the binary files and how many classes they have, here or in the archive's own folder."""
    for place in (folder, *(folder / name for name in INNER)):
        for classes, splits in FILES.items():
            if all((place / names[0]).is_file() for names in splits.values()):
                return place, classes
    return None


class CifarImages(ImageSet):
    """A split of CIFAR, mapped into memory; of CIFAR-100's two labels the fine one counts."""

    channels, size = 3, (SIDE, SIDE)

    def __init__(self, folder: Path, classes: int, split: str) -> None:
        self.name = f"cifar-{classes} ({split})"
        self._head = 1 if classes == 10 else 2
        self._files = [path for name in FILES[classes][split] if (path := folder / name).is_file()]
        self._records = [self._open(path) for path in self._files]
        self._edges = np.cumsum([0, *(len(part) for part in self._records)])
        self.labels = np.concatenate([part[:, self._head - 1] for part in self._records]).astype(np.int64)
        self.class_names = _class_names(folder / NAMES[classes], classes)
        check_labels(self.name, self.labels, classes)

    def _open(self, path: Path) -> Pixels:
        size, record = path.stat().st_size, self._head + PLANES
        if size == 0 or size % record:
            raise DataError(f"images: {str(path)!r} is damaged; its {size} bytes are not records of {record} bytes")
        return np.memmap(path, dtype=np.uint8, mode="r", shape=(size // record, record))

    def __getitem__(self, number: int) -> Pixels:
        part = int(np.searchsorted(self._edges, number, side="right")) - 1
        planes = self._records[part][number - self._edges[part], self._head :]
        return np.ascontiguousarray(planes.reshape(3, SIDE, SIDE).transpose(1, 2, 0))

    def _fingerprint(self) -> str:
        return hashlib.sha256("".join(map(sha256_of, self._files)).encode()).hexdigest()


def _class_names(path: Path, classes: int) -> tuple[str, ...]:
    names = [name.strip() for name in read_text(path, "images").split("\n")] if path.is_file() else []
    names = [name for name in names if name]
    return tuple(names) if len(names) == classes else tuple(str(number) for number in range(classes))
