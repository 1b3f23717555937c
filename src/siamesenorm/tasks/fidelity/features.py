"""What a feature network gives the measures, and how one is called on pictures."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn

from siamesenorm.data.images.image_files import as_channels
from siamesenorm.errors import DataError
from siamesenorm.models.fingerprint import weights_hash


class Features(NamedTuple):
    """Of a batch of images."""

    pool: Tensor
    """(images, features): for the Fréchet distance, precision and recall."""
    spatial: Tensor | None
    """(images, features with their places): for sFID (arXiv 2103.03841), where the network has them."""
    logits: Tensor
    """(images, classes)."""


class FeatureNetwork:
    """A network with its name; ``fingerprint`` changes with any weight, so that statistics name what made them.

    channels: of the images it takes; grey is repeated for three, and colours are made grey for one.
    size: (height, width) that images must have; None where it takes any. class_names: of its logits, where the
    classes of images may be asked for.
    """

    def __init__(
        self,
        name: str,
        module: nn.Module,
        *,
        channels: int = 3,
        size: tuple[int, int] | None = None,
        class_names: Sequence[str] = (),
        device: str | torch.device = "cpu",
    ) -> None:
        self.name, self.channels, self.size, self.device = name, channels, size, device
        self.class_names = tuple(class_names)
        self.precision: torch.dtype | None = None
        self.fingerprint = weights_hash(module)
        self.module = module.to(device).eval().requires_grad_(False)

    def to(self, device: torch.device, precision: torch.dtype | None = None) -> FeatureNetwork:
        """The same network, from now on on another device, and by autocast in another precision if one is given."""
        self.module, self.device, self.precision = self.module.to(device), device, precision
        if precision is not None:  # statistics of one precision are not taken for those of another
            self.fingerprint += f"-{str(precision).removeprefix('torch.')}"
        return self

    def __call__(self, images: NDArray[np.uint8]) -> Features:
        """Features of uint8 images (images, height, width, channels), on the CPU."""
        if self.size is not None and images.shape[1:3] != self.size:
            raise DataError(
                f"images: {images.shape[1]} × {images.shape[2]} pixels are not allowed; the {self.name} takes "
                f"{self.size[0]} × {self.size[1]}"
            )
        pixels = np.array(as_channels(images.reshape(len(images), -1, images.shape[3]), self.channels))
        pixels = pixels.reshape(*images.shape[:3], self.channels)
        kind, lower = torch.device(self.device).type, self.precision is not None
        with torch.inference_mode(), torch.autocast(kind, dtype=self.precision, enabled=lower):
            found = self.module(torch.from_numpy(pixels).permute(0, 3, 1, 2).to(self.device))
        spatial = None if found.spatial is None else found.spatial.float().cpu()
        return Features(found.pool.float().cpu(), spatial, found.logits.float().cpu())
