"""Encoded images as a labelled set: memory-mapped moments, and the draw that makes a latent of them.

An autoencoder gives a normal distribution for an image; the official code draws a latent of it whenever the image is
seen. What is stored is therefore mean and deviation, and every sample draws its own latent.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from siamesenorm.data.arrays import map_array
from siamesenorm.data.images.imageset import ImageSet, Labels, Split, check_labels
from siamesenorm.data.latents.index import LatentIndex, LatentShard, read_latent_index
from siamesenorm.errors import DataError

PosteriorMoments = NDArray[Any]
"""(views, 2 · channels, height, width): means, then deviations; the second view is of the mirror image."""


@dataclass(frozen=True)
class PosteriorSample:
    """A latent as a model sees it: ``(mean + deviation · noise - shift) · scale``.

    flip: how often the mirror image is taken. random: without it the mean is taken, for held-out images.
    """

    scale: float
    shift: float = 0.0
    flip: float = 0.0
    random: bool = True

    def __call__(self, image: PosteriorMoments, generator: np.random.Generator) -> NDArray[np.float32]:
        """(channels, height, width); the same generator state gives the same."""
        view = int(self.flip > 0 and generator.random() < self.flip)
        mean, deviation = np.split(np.asarray(image[view], dtype=np.float32), 2)
        if self.random:
            mean = mean + deviation * generator.standard_normal(mean.shape, dtype=np.float32)
        return np.ascontiguousarray((mean - np.float32(self.shift)) * np.float32(self.scale))


class LatentImages(ImageSet):
    """A split of a latent folder; ``latents[3]`` has an image's moments, ``latents.transform()`` draws of them."""

    def __init__(self, folder: Path, index: LatentIndex, split: Split) -> None:
        self.name, self.index = f"{folder} ({split})", index
        self.class_names, self.channels = tuple(index.class_names), index.channels
        self.size = (index.size, index.size)
        self.shards = index.splits[split]
        if not self.shards:
            raise DataError(f"latents: {str(folder)!r} has no images for {split}")
        self.arrays = [self._open(folder, shard) for shard in self.shards]
        self.starts = np.cumsum([0] + [shard.images for shard in self.shards])
        self.labels: Labels = np.concatenate([_load(folder / shard.labels) for shard in self.shards]).astype(np.int64)
        if self.labels.shape != (self.starts[-1],):
            raise DataError(f"latents: {str(folder)!r} is damaged: it has {self.labels.size} labels for {split}")
        check_labels(self.name, self.labels, len(self.class_names))

    def transform(self, *, flip: float = 0.0, random: bool = True) -> PosteriorSample:
        """What makes latents of this set's moments."""
        if flip and self.index.views < 2:
            raise DataError.not_allowed(
                "flip", flip, "0, or images encoded again with --flip", when=f"for {self.name!r}"
            )
        return PosteriorSample(self.index.scale, self.index.shift, flip, random)

    def _open(self, folder: Path, shard: LatentShard) -> PosteriorMoments:
        array = _load(folder / shard.file)
        wanted = (shard.images, self.index.views, 2 * self.index.channels, self.index.size, self.index.size)
        if array.shape != wanted or array.dtype != self.index.dtype:
            raise DataError(f"latents: {str(folder / shard.file)!r} is damaged: {array.dtype} {array.shape}")
        return array

    def __getitem__(self, number: int) -> PosteriorMoments:
        shard = int(np.searchsorted(self.starts, number, side="right")) - 1
        return self.arrays[shard][number - int(self.starts[shard])]

    def _fingerprint(self) -> str:
        hashes = [part for shard in self.shards for part in (shard.sha256, shard.labels_sha256)]
        facts = f"{self.index.scale} {self.index.shift} {self.index.class_names}"
        return hashlib.sha256(" ".join([facts, *hashes]).encode()).hexdigest()


def _load(path: Path) -> NDArray[Any]:
    try:
        return map_array(path, "latents")
    except DataError:
        raise DataError(f"latents: {str(path)!r} is damaged or missing; encode the images again to mend it") from None


def open_latents(folder: str | Path, split: Split = "train") -> LatentImages:
    """A split of a folder that ``siamesenorm data encode-images`` wrote."""
    return LatentImages(Path(folder), read_latent_index(folder), split)
