"""timm's training transforms (extra: vision), as DeiT has them: random crops, RandAugment, colour jitter, erasing."""

from __future__ import annotations

from typing import Any

import numpy as np

from siamesenorm.data.images.image_files import as_channels
from siamesenorm.data.images.imageset import Pixels
from siamesenorm.data.images.transforms import Interpolation, Scale, Seen
from siamesenorm.data.seeding import seeded
from siamesenorm.errors import DataError, check_torchvision, import_extra


def import_timm(module: str, purpose: str) -> Any:
    """A module of timm."""
    check_torchvision()
    return import_extra(module, purpose, "vision")


class TimmTransform:
    """``timm.data.create_transform`` for training, whose randomness comes from the given generator alone.

    rand_augment: timm's description of an augmentation policy, such as rand-m9-mstd0.5-inc1; None: colour jitter.
    """

    def __init__(
        self,
        shape: tuple[int, int],
        channels: int,
        scale: Scale,
        *,
        flip: float = 0.5,
        rand_augment: str | None = "rand-m9-mstd0.5-inc1",
        color_jitter: float = 0.3,
        erasing: float = 0.25,
        interpolation: Interpolation = "bicubic",
    ) -> None:
        data = import_timm("timm.data", "data.augment = 'timm'")
        self.channels = channels
        try:
            self.transform = data.create_transform(
                (channels, *shape),
                is_training=True,
                hflip=flip,
                color_jitter=color_jitter or None,
                auto_augment=rand_augment,
                interpolation=interpolation,
                mean=scale.mean,
                std=scale.std,
                re_prob=erasing,
                re_mode="pixel",
                re_count=1,
            )
        except (AssertionError, ValueError, KeyError, NotImplementedError) as error:
            reason = " ".join(str(error).split()) or "timm does not know it"
            raise DataError(f"data.rand_augment: {rand_augment!r} is not allowed: {reason}") from None
        if max(shape) <= 32:  # DeiT's choice for CIFAR: no zoom into images this small
            vision = import_extra("torchvision.transforms", "data.augment = 'timm'", "vision")
            steps = self.transform.transforms
            self.transform.transforms = [
                vision.Resize(shape, vision.InterpolationMode(interpolation)),
                vision.RandomCrop(shape, padding=4),
                *steps[1:],
            ]

    def __call__(self, image: Pixels, generator: np.random.Generator) -> Seen:
        """An augmented image."""
        from PIL import Image

        pixels = as_channels(image, self.channels)
        picture = Image.fromarray(pixels[..., 0] if self.channels == 1 else np.ascontiguousarray(pixels))
        with seeded(int(generator.integers(2**63)), gpus=False):
            seen: Seen = self.transform(picture).numpy()
        return seen
