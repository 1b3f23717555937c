"""Folders of images, one sub-folder per class, decoded when an image is asked for."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import numpy as np

from siamesenorm.data.images.image_files import ENDINGS, decode
from siamesenorm.data.images.imageset import ImageSet, Pixels
from siamesenorm.data.listing import walk
from siamesenorm.errors import DataError

SPLIT_FOLDERS = {"train": ("train", "training"), "test": ("val", "valid", "validation", "test")}
PROBED = 64
"""Files whose contents the fingerprint takes in beside the names and sizes of all."""


def split_folder(root: Path, split: str) -> Path | None:
    """The folder of a split, if the root has folders for splits."""
    return next((root / name for name in SPLIT_FOLDERS[split] if (root / name).is_dir()), None)


def folder_name(class_name: str) -> str:
    """What the folder of a class is called: its name, without what would make it two folders."""
    return class_name.replace("/", "-")


class FolderImages(ImageSet):
    """Images in ``root/CLASS/…``; classes are numbered in the order of their names.

    class_names: of the training folder, so that both splits number alike; a class that is not among them is an error.
    """

    def __init__(self, root: Path, *, class_names: tuple[str, ...] | None = None, channels: int = 3) -> None:
        self.root, self.name, self.channels = root, root.resolve().name, channels
        found = sorted(entry.name for entry in os.scandir(root) if entry.is_dir() and not entry.name.startswith("."))
        files = {name: _images_in(root / name) for name in found}
        present = tuple(name for name in found if files[name])
        if not present:
            raise DataError(f"images: folder {str(root)!r} has no sub-folders with images; it takes one for each class")
        self.class_names = class_names or present
        unknown = [name for name in present if name not in self.class_names]
        if unknown:
            raise DataError(f"images: class {unknown[0]!r} of {str(root)!r} is not among those of the training images")
        numbers = {name: number for number, name in enumerate(self.class_names)}
        # One array of text: a million paths as Python strings would be copied into every worker.
        self._paths = np.array([path for name in present for path in files[name]])
        self.labels = np.array([numbers[name] for name in present for _ in files[name]], dtype=np.int64)

    def __getitem__(self, number: int) -> Pixels:
        path = self.root / str(self._paths[number])
        return decode(path, str(path), self.channels)

    def _fingerprint(self) -> str:
        digest = hashlib.sha256(repr(self.class_names).encode())
        for relative in self._paths:
            digest.update(f"{relative}\0{(self.root / str(relative)).stat().st_size}\n".encode())
        for number in np.unique(np.linspace(0, len(self) - 1, PROBED).astype(int)):
            digest.update((self.root / str(self._paths[number])).read_bytes())
        return digest.hexdigest()


def _images_in(folder: Path) -> list[str]:
    """Paths relative to the folder's parent, in order."""
    found = []
    for place, inner, files in walk(folder):
        inner[:] = sorted(name for name in inner if not name.startswith("."))
        found += [
            os.path.relpath(os.path.join(place, file), folder.parent)
            for file in files
            if file.lower().endswith(ENDINGS) and not file.startswith(".")
        ]
    return sorted(found)
