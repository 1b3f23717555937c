"""Images with the time and noise of each sample, in training and held out; pixels scaled to ±1, or latents.

Times and noise are functions of a seed and the sample's number alone, not drawn one after another: a run resumes at any
sample with the same noise, at any number of processes.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from siamesenorm.data.batches import Batch
from siamesenorm.data.images import ImageSet
from siamesenorm.data.images.loader import TestImages, TrainingImages
from siamesenorm.data.images.transforms import CentreCrop, Scale, Shift, Transform
from siamesenorm.data.latents import LatentImages
from siamesenorm.errors import DataError
from siamesenorm.models.dit import DiTConfig
from siamesenorm.tasks.diffusion.config import DiffusionDataConfig

HELD_OUT_SEED = 1
"""Held-out images have the same times and noise in every run."""


def draw(seed: int, samples: NDArray[np.int64], shape: tuple[int, ...]) -> dict[str, Tensor]:
    """``time`` (batch,) in [0, 1) and ``noise`` (batch, *shape) for samples by their numbers."""
    times = np.empty(len(samples), dtype=np.float64)
    noise = np.empty((len(samples), *shape), dtype=np.float32)
    for place, number in enumerate(samples):
        generator = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, int(number)]))
        times[place] = generator.random()
        generator.standard_normal(out=noise[place], dtype=np.float32)
    return {"time": torch.from_numpy(times), "noise": torch.from_numpy(noise)}


class NoisyImages(TrainingImages):
    """Training images, each sample with a time and noise of its own."""

    def batch(self, samples: NDArray[np.int64]) -> Batch:
        """Images, labels, times and noise."""
        batch = super().batch(samples)
        return {**batch, **draw(self.seed, samples, tuple(batch["image"].shape[1:]))}


class NoisyTestImages(TestImages):
    """Held-out images, each always with the same time and noise; times are spread evenly over the images."""

    def batches(self, size: int, *, rank: int = 0, world_size: int = 1) -> Iterator[Batch]:
        """All of a rank's images, so many at a time."""
        for number, batch in enumerate(super().batches(size, rank=rank, world_size=world_size)):
            places = size * (number * world_size + rank) + np.arange(len(batch["label"]), dtype=np.int64)
            drawn = draw(HELD_OUT_SEED, places, tuple(batch["image"].shape[1:]))
            # Every stretch of times has its share of images, so that few images measure all of them.
            golden = (places * 0.6180339887498949) % 1
            yield {**batch, **drawn, "time": torch.from_numpy(golden)}


def check_shape(images: ImageSet, source: str, model: DiTConfig) -> None:
    """Raise where a model makes other channels, or latents of another size."""
    if isinstance(images, LatentImages):
        if (images.channels, images.size) != (model.channels, (model.input_size,) * 2):
            raise DataError(
                f"model.input_size = {model.input_size} and model.channels = {model.channels} are not allowed; "
                f"the latents of {source!r} take {images.index.size} and {images.channels}"
            )
    elif model.channels not in (1, 3):
        raise DataError.refused("model.channels =", model.channels, "images of pixels take 1 or 3")


def transform_of(model: DiTConfig, images: ImageSet) -> Transform:
    """Bytes to ±1 in the model's size; the means of latents."""
    return images.transform(random=False) if isinstance(images, LatentImages) else _fitted(model)


def augmentation_of(model: DiTConfig, data: DiffusionDataConfig, images: ImageSet) -> Transform:
    """The same with mirror images; latents are drawn."""
    if isinstance(images, LatentImages):
        return images.transform(flip=data.flip)
    plain = _fitted(model)
    return Shift(plain, 0, data.flip) if data.flip else plain


def _fitted(model: DiTConfig) -> CentreCrop:
    half = (0.5,) * model.channels
    return CentreCrop((model.input_size, model.input_size), model.channels, Scale(half, half))


def to_bytes(images: Tensor) -> NDArray[np.uint8]:
    """±1, (images, channels, height, width), to bytes (images, height, width, channels)."""
    scaled = ((images.detach().float().cpu() + 1) * 127.5).round().clamp(0, 255)
    return np.asarray(scaled.to(torch.uint8).permute(0, 2, 3, 1).contiguous().numpy(), dtype=np.uint8)
