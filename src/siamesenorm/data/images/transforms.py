"""From an image to what a model sees: size, augmentation, scale; everything random comes from a given generator."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
from numpy.typing import NDArray

from siamesenorm.data.images.image_files import as_channels
from siamesenorm.data.images.imageset import Pixels
from siamesenorm.errors import import_extra

Seen = NDArray[np.float32]
"""(channels, height, width), scaled."""
Interpolation = Literal["bicubic", "bilinear", "nearest"]


class Transform(Protocol):
    """An image made ready; the same image and a generator in the same state give the same."""

    def __call__(self, image: Pixels, generator: np.random.Generator) -> Seen:
        """What a model sees."""


@dataclass(frozen=True)
class Scale:
    """Bytes to numbers: ``(value / 255 - mean) / std`` for every channel."""

    mean: tuple[float, ...]
    std: tuple[float, ...]

    def __call__(self, image: Pixels) -> Seen:
        """Scaled, channels first."""
        mean, std = np.asarray(self.mean, np.float32), np.asarray(self.std, np.float32)
        return np.ascontiguousarray(((image.astype(np.float32) / 255 - mean) / std).transpose(2, 0, 1))


@dataclass(frozen=True)
class CentreCrop:
    """The image's shorter side to size / share, then the middle: how images are evaluated.

    With share = 1 and images of the right size already, nothing is done.
    """

    shape: tuple[int, int]
    channels: int
    scale: Scale
    share: float = 1.0
    interpolation: Interpolation = "bicubic"

    def __call__(self, image: Pixels, generator: np.random.Generator) -> Seen:
        """The image fitted and scaled; nothing is random."""
        return self.scale(self.fitted(image))

    def fitted(self, image: Pixels) -> Pixels:
        """Resized and cropped, still bytes."""
        image = as_channels(image, self.channels)
        if self.share == 1.0 and image.shape[:2] == self.shape:
            return image
        wanted = [math.floor(side / self.share) for side in self.shape]
        height, width = image.shape[:2]
        if wanted[0] * width >= wanted[1] * height:  # the height is what must grow most, or shrink least
            size = (wanted[0], max(int(wanted[0] * width / height), self.shape[1]))
        else:
            size = (max(int(wanted[1] * height / width), self.shape[0]), wanted[1])
        resized = resize(image, size, self.interpolation)
        top, left = (round((have - want) / 2.0) for have, want in zip(size, self.shape, strict=True))
        return resized[top : top + self.shape[0], left : left + self.shape[1]]


@dataclass(frozen=True)
class Shift:
    """Light augmentation for small images: a move of up to so many pixels each way, and perhaps a mirror image."""

    fit: CentreCrop
    pixels: int = 1
    flip: float = 0.0

    def __call__(self, image: Pixels, generator: np.random.Generator) -> Seen:
        """The image fitted, moved, mirrored and scaled."""
        fitted = self.fit.fitted(image)
        if self.pixels:
            down, right = generator.integers(0, 2 * self.pixels + 1, size=2)
            edges = ((self.pixels, self.pixels), (self.pixels, self.pixels), (0, 0))
            padded = np.pad(fitted, edges)
            fitted = padded[down : down + fitted.shape[0], right : right + fitted.shape[1]]
        if self.flip and generator.random() < self.flip:
            fitted = fitted[:, ::-1]
        return self.fit.scale(fitted)


def resize(image: Pixels, size: tuple[int, int], interpolation: Interpolation) -> Pixels:
    """(height, width, channels) of another height and width, by pillow's antialiased filters."""
    module: Any = import_extra("PIL.Image", "resizing images", "vision")
    picture = module.fromarray(image[..., 0] if image.shape[2] == 1 else np.ascontiguousarray(image))
    pixels = np.asarray(picture.resize((size[1], size[0]), getattr(module.Resampling, interpolation.upper())))
    return pixels if pixels.ndim == 3 else pixels[..., None]


def per_channel(values: Sequence[float], channels: int) -> tuple[float, ...]:
    """One number for every channel, where one may be given for all."""
    return tuple(values) * channels if len(values) == 1 else tuple(values)
