"""What every source of labelled images gives: images by number, labels, names of classes, a fingerprint."""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from collections.abc import Sequence
from functools import cached_property
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from siamesenorm.errors import DataError

Pixels = NDArray[np.uint8]
"""(height, width, channels)."""
Labels = NDArray[np.int64]
Split = Literal["train", "test"]
SPLITS: tuple[str, ...] = get_args(Split)
MOST_PIXELS = 2**28
"""Pixels of one image beyond which a header is damaged or made to harm."""


class ImageSet(ABC):
    """Labelled images: ``images[3]`` is an array (height, width, channels) of bytes, ``images.label(3)`` its class.

    channels: 1 (grey) or 3 (red, green, blue), the same for all images.
    size: (height, width) where all images have the same, else None.
    """

    name: str
    class_names: tuple[str, ...]
    channels: int
    size: tuple[int, int] | None = None
    labels: Labels
    """The class of every image."""

    @abstractmethod
    def __getitem__(self, number: int) -> Pixels: ...

    @abstractmethod
    def _fingerprint(self) -> str: ...

    @cached_property
    def fingerprint(self) -> str:
        """SHA-256 of what the images are, so that two runs can tell whether they had the same."""
        return self._fingerprint()

    def __len__(self) -> int:
        return int(self.labels.size)

    def label(self, number: int) -> int:
        """The class of an image."""
        return int(self.labels[number])


class ArrayImages(ImageSet):
    """Images that lie in one array (images, height, width, channels), in memory or in a mapped file."""

    def __init__(self, name: str, images: Pixels, labels: Labels, class_names: Sequence[str]) -> None:
        self.name, self.class_names = name, tuple(class_names)
        self._images, self.labels = images, labels
        self.channels = int(images.shape[3])
        self.size = (int(images.shape[1]), int(images.shape[2]))
        check_labels(name, labels, len(self.class_names))

    def __getitem__(self, number: int) -> Pixels:
        return np.asarray(self._images[number])

    def _fingerprint(self) -> str:
        digest = hashlib.sha256(f"{self._images.shape} {self.class_names}".encode())
        for start in range(0, len(self._images), 4096):
            digest.update(np.ascontiguousarray(self._images[start : start + 4096]).data)
        digest.update(np.ascontiguousarray(self.labels).data)
        return digest.hexdigest()


class Subset(ImageSet):
    """Some images of a set, in the order of their numbers."""

    def __init__(self, whole: ImageSet, numbers: Labels, name: str) -> None:
        self.whole, self.numbers, self.name = whole, numbers, name
        self.class_names, self.channels, self.size = whole.class_names, whole.channels, whole.size
        self.labels = whole.labels[numbers]

    def __getitem__(self, number: int) -> Pixels:
        return self.whole[int(self.numbers[number])]

    def _fingerprint(self) -> str:
        numbers = np.ascontiguousarray(self.numbers, dtype=np.int64)
        return hashlib.sha256(self.whole.fingerprint.encode() + numbers.tobytes()).hexdigest()


def check_labels(place: str, labels: Labels, classes: int) -> None:
    """Raise if a label is no class."""
    if labels.size and not (int(labels.min()) >= 0 and int(labels.max()) < classes):
        wrong = labels[(labels < 0) | (labels >= classes)][0]
        raise DataError(f"images: {place!r} has label {int(wrong)}; with {classes} classes it takes 0 to {classes - 1}")


def hold_out(whole: ImageSet, split: Split, share: float, seed: int = 0) -> Subset:
    """One side of a fixed split: of every class, a `share` of its images (rounded, at least one) is for testing."""
    if not 0 < share < 1:
        raise DataError.not_allowed("held_out", share, "a number between 0 and 1")
    held = np.zeros(len(whole), dtype=bool)
    for label in np.unique(whole.labels):
        members = np.flatnonzero(whole.labels == label)
        count = min(max(1, round(share * members.size)), members.size - 1)
        draw = np.random.default_rng([seed, int(label)]).permutation(members.size)
        held[members[draw[:count]]] = True
    chosen = np.flatnonzero(held if split == "test" else ~held).astype(np.int64)
    return Subset(whole, chosen, f"{whole.name} ({split})")
