"""A small classifier whose features stand in for Inception's: trained on the same images in seconds, kept by content.

The Fréchet distance in its features is **not FID**: it compares runs on the same images, nothing else.
"""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import math
import os
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save
from torch import Tensor, nn
from torch.nn import functional as F

from siamesenorm.data.atomic import write_whole
from siamesenorm.data.images import ImageSet
from siamesenorm.data.tensors import read_tensors
from siamesenorm.errors import DataError
from siamesenorm.tasks.fidelity.features import FeatureNetwork, Features
from siamesenorm.tasks.fidelity.image_batches import Images

VERSION = 2
FEATURES = 64
BATCH, LEARNING_RATE = 128, 1e-2
EPOCHS, LEAST_STEPS, MOST_STEPS = 2, 300, 1000
SHIFT = 16
"""Training images are moved by up to a pixel in so many, at least by one."""


class SmallClassifier(nn.Module):
    """Three 3×3 convolutions, halving large images in between; the mean over places is the feature vector."""

    def __init__(self, channels: int, classes: int, size: tuple[int, int]) -> None:
        super().__init__()
        halvings = min(3, max(0, round(math.log2(min(size) / 4))))
        widths = (channels, FEATURES // 4, FEATURES // 2, FEATURES)
        self.convolutions = nn.ModuleList(
            nn.Conv2d(before, after, 3, stride=2 if place > 2 - halvings else 1, padding=1)
            for place, (before, after) in enumerate(itertools.pairwise(widths))
        )
        self.norms = nn.ModuleList(nn.BatchNorm2d(width) for width in widths[1:])
        self.head = nn.Linear(FEATURES, classes)

    def forward(self, images: Tensor) -> Features:
        """Of bytes or floats 0…255."""
        x = images.float() / 127.5 - 1
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = F.relu(norm(convolution(x)))
        pool = x.mean((2, 3))
        return Features(pool, None, self.head(pool))


def default_cache() -> Path:
    """Where classifiers and statistics are kept for the next time."""
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "siamesenorm"


@torch.inference_mode(False)
def classifier_for(images: ImageSet, cache: Path | None = None) -> FeatureNetwork:
    """The classifier of a training set: read where it was trained before, else trained now and kept."""
    height, width = images[0].shape[:2]
    module = SmallClassifier(images.channels, len(images.class_names), (height, width))
    steps = min(max(LEAST_STEPS, EPOCHS * len(images) // BATCH), MOST_STEPS)
    name = hashlib.sha256(f"{VERSION} {torch.__version__} {steps} {images.fingerprint}".encode()).hexdigest()[:24]
    path = (cache or default_cache()) / f"classifier-{name}.safetensors"
    if not _load(module, path):
        train(module, images, steps)
        with contextlib.suppress(OSError):  # what cannot be kept is trained again
            path.parent.mkdir(parents=True, exist_ok=True)
            write_whole(path, save(module.state_dict()))
    return FeatureNetwork(
        "classifier", module, channels=images.channels, size=(height, width), class_names=images.class_names
    )


def _load(module: nn.Module, path: Path) -> bool:
    try:
        module.load_state_dict(read_tensors(path, "cache")[0])
    except (DataError, RuntimeError):
        return False  # not there, or damaged: it is trained again
    return True


@torch.enable_grad()
def train(module: SmallClassifier, images: ImageSet, steps: int) -> None:
    """The same steps every time: one seed for weights, order and shifts; the learning rate falls to zero."""
    order = np.random.default_rng(0)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        for part in module.modules():
            if isinstance(part, (nn.Conv2d, nn.Linear)):
                part.reset_parameters()
    module.train()
    optimizer = torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE, weight_decay=0.05)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, LEARNING_RATE, total_steps=steps)
    for _ in range(steps):
        chosen = order.integers(len(images), size=BATCH)
        pixels = torch.from_numpy(stacked(images, chosen.tolist())).permute(0, 3, 1, 2)
        logits = module(_shifted(pixels, order)).logits
        loss = F.cross_entropy(logits, torch.from_numpy(images.labels[chosen]), label_smoothing=0.1)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
    module.eval()


def stacked(images: ImageSet, numbers: Sequence[int]) -> Images:
    """Some images as one array."""
    try:
        return np.stack([images[number] for number in numbers])
    except ValueError:
        raise DataError(f"images: {images.name!r} has images of several sizes; a classifier takes one size") from None


def _shifted(images: Tensor, order: np.random.Generator) -> Tensor:
    """A batch moved by a few pixels; what comes in repeats the edge."""
    height, width = images.shape[-2:]
    down, right = (max(1, length // SHIFT) for length in (height, width))
    y, x = int(order.integers(-down, down + 1)), int(order.integers(-right, right + 1))
    rows = (torch.arange(height) + y).clamp(0, height - 1)
    columns = (torch.arange(width) + x).clamp(0, width - 1)
    return images[:, :, rows][:, :, :, columns]
