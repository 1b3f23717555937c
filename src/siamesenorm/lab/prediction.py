"""What a trained classifier says of images, from a run folder or an exported file of weights."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from siamesenorm.data.arrays import read_array
from siamesenorm.data.images.image_files import decode
from siamesenorm.data.images.imageset import Pixels
from siamesenorm.data.images.transforms import CentreCrop
from siamesenorm.data.reading import parse_json, reason_of
from siamesenorm.data.tensors import read_tensors
from siamesenorm.errors import ConfigError, DataError
from siamesenorm.models.vit import VisionTransformer, ViTConfig
from siamesenorm.tasks.base import check_limits
from siamesenorm.tasks.classification import ClassificationTask, transform_of
from siamesenorm.tasks.classification_config import ImageDataConfig
from siamesenorm.tasks.sharing import Sharing
from siamesenorm.train.inference import Inference
from siamesenorm.train.trained import open_trained

Answer = list[tuple[str, float]]
"""Classes with their probabilities, likeliest first."""


@dataclass(frozen=True)
class Classifier:
    """A trained model, how it wants its images, and what its classes are called."""

    model: VisionTransformer
    transform: CentreCrop
    class_names: list[str]

    def __call__(
        self, images: list[Pixels], top: int = 5, at_once: int = 64, place: Inference | None = None
    ) -> list[Answer]:
        """The likeliest classes of each image (height, width, channels) of bytes.

        place: processes that share the images; default: this one alone.
        """
        parts = (images[start : start + at_once] for start in range(0, len(images), at_once))
        answers = (place.each if place is not None else Sharing().each)(parts, partial(self._answers, top=top))
        return [answer for part in answers for answer in part]

    @torch.no_grad()
    def _answers(self, images: list[Pixels], top: int) -> list[Answer]:
        generator, device = np.random.default_rng(0), next(self.model.parameters()).device
        seen = np.stack([self.transform(image, generator) for image in images])
        logits = self.model(torch.from_numpy(seen).to(device))
        chances, classes = torch.softmax(logits.float(), dim=1).topk(min(top, logits.shape[1]), dim=1)
        return [
            [(self.name(number), share) for number, share in zip(numbers, shares, strict=True)]
            for shares, numbers in zip(chances.tolist(), classes.tolist(), strict=True)
        ]

    def name(self, number: int) -> str:
        """What a class is called; its number where it has no name."""
        return self.class_names[number] if number < len(self.class_names) else str(number)


def open_classifier(path: Path | str) -> Classifier:
    """The classifier of a run folder, finished or not, or of a file that `siamesenorm export` wrote."""
    if Path(path).is_file():
        return _open_file(Path(path))
    trained = open_trained(path, "classification")
    config: Any = trained.config
    assert isinstance(trained.model, VisionTransformer)
    names = ClassificationTask.class_names(config, trained.folder)
    return Classifier(trained.model, transform_of(config.model, config.data), names)


def _open_file(path: Path) -> Classifier:
    tensors, header = read_tensors(path, "run")
    if header.get("task") != "classification":
        found = header.get("task", "unknown")
        raise ConfigError(f"run: {str(path)!r} holds a model of task {found}; it takes one of classification")
    try:
        config = ViTConfig.model_validate_json(header["config"])
        check_limits(config)
        data = ImageDataConfig.model_validate_json(header["data"])
        names = [str(name) for name in parse_json(header["class_names"])]
        with torch.device("meta"):
            model = VisionTransformer(config)
        model.load_state_dict(tensors, assign=True)
    except (RuntimeError, LookupError, TypeError, ValueError) as error:
        raise ConfigError(f"run: {str(path)!r} is no exported classifier: {reason_of(error)}") from None
    return Classifier(model.requires_grad_(False).eval(), transform_of(config, data), names)


def read_image(path: Path) -> list[Pixels]:
    """The image of a file, or of a .npy array: bytes of (height, width), with 1 or 3 channels, or a stack of them."""
    if not path.is_file():
        raise DataError(f"image: {str(path)!r} is not a file; it takes image files and .npy arrays")
    if path.suffix.lower() != ".npy":
        return [decode(path, str(path))]
    array = read_array(path, "image")
    shape = array.shape
    if array.ndim == 2:
        array = array[None, ..., None]
    elif array.ndim == 3:
        array = array[None] if shape[2] in (1, 3) else array[..., None]
    if array.dtype != np.uint8 or array.ndim != 4 or array.shape[3] not in (1, 3) or not array.size:
        raise DataError(
            f"image: {str(path)!r} is an array {shape} of {array.dtype}; it takes uint8 (height, width), "
            f"(height, width, channels) or a stack of them, with 1 or 3 channels"
        )
    return list(array)
