"""What tasks on images share: the section that names them, how they are opened and checked, batches, class names."""

from __future__ import annotations

from collections.abc import Callable
from functools import cached_property
from pathlib import Path
from typing import Annotated, Any, ClassVar

from pydantic import Field
from torch import nn

from siamesenorm.data.atomic import write_json
from siamesenorm.data.images import ImageSet, open_images
from siamesenorm.data.images.imageset import Split
from siamesenorm.data.images.loader import ImageLoader, TestImages, TrainingImages
from siamesenorm.data.reading import read_object
from siamesenorm.errors import DataError
from siamesenorm.models.counts import FLOAT32, Counts
from siamesenorm.tasks.base import HOW, Section, Task
from siamesenorm.tasks.metrics import Metrics

IMAGES = "images.json"
"""Beside a finished run's weights: names of its classes, and which images it had."""


class ImageSourceConfig(Section):
    """Where images come from, and how they reach the model."""

    train: str = Field(
        min_length=1,
        description="digits, fashion-mnist, hf:NAME, a .parquet file, or a folder: IDX, CIFAR, parquet, CLASS/….",
    )
    test: str | None = Field(default=None, description="Images to test on; null: the training source's own.")
    held_out: float = Field(
        default=0.2, gt=0, lt=1, description="Share of each class to test on, where a source has no test images."
    )
    image_column: str | None = Field(default=None, description="Of tables; null: image, img or what is usual.")
    label_column: str | None = Field(default=None, description="Of tables; null: label or what is usual.")
    shuffle_seed: int | None = Field(
        default=None, ge=0, lt=2**63, description="Of all that is random about the data; null: train.seed."
    )
    workers: Annotated[int, HOW] = Field(
        default=0, ge=0, le=256, description="Processes that prepare images; 0: the training one."
    )
    prefetch: Annotated[int, HOW] = Field(default=2, ge=1, le=1024, description="Batches that each worker makes ahead.")


class ImageTask(Task):
    """A task whose samples are labelled images; a subclass says what is learnt of them."""

    unit = "images"
    in_parts = True
    model_class: ClassVar[Callable[..., nn.Module]]
    """Made from the model section, with a seed where it is to have its first weights."""
    count: ClassVar[Callable[[Any], Counts]]
    """What such a model costs."""
    data: TrainingImages
    held_out: TestImages | None
    """What is evaluated on; None where nothing is."""

    def __init__(self, config: Any) -> None:
        self.model_config, self.data_config, self.evaluation = config.model, config.data, config.evaluation
        self.seed, self.batch_size = config.train.seed, config.train.batch_size
        data = self.data_config
        self.shuffle_seed: int = self.seed if data.shuffle_seed is None else data.shuffle_seed
        self.images = self.open_split(config, data.train, "train")
        self.test_images: ImageSet | None = None
        if self.evaluation.every is not None:
            found = self.open_split(config, data.test or data.train, "test")
            if found.class_names != self.images.class_names:
                raise DataError(f"data.test: the classes of {found.name!r} are not those of {self.images.name!r}")
            self.test_images = found

    @classmethod
    def open_split(cls, config: Any, source: str, split: Split) -> ImageSet:
        """One side of a source, checked against the model; with a data.test of its own, data.train is taken whole."""
        data = config.data
        images = open_images(
            source,
            split,
            held_out=data.held_out if data.test is None else None,
            image_column=data.image_column,
            label_column=data.label_column,
            channels=config.model.channels,
        )
        return fitting(images, source, config.model.classes)

    @classmethod
    def only_trained_on(cls, config: Any) -> set[str]:
        """The training images, where others are tested on."""
        data = config.data
        return {data.train} - {data.test or data.train}

    @classmethod
    def class_names(cls, config: Any, folder: Path) -> list[str]:
        """Names of a run's classes: as it left them when it finished, or as its images have them, or numbers."""
        try:
            names = read_object(folder / IMAGES, "run")["class_names"]
            return [str(name) for name in names]
        except (DataError, KeyError, TypeError):
            pass
        try:
            return list(cls.open_split(config, config.data.train, "train").class_names)
        except DataError:
            return [str(number) for number in range(config.model.classes)]

    @classmethod
    def model_of(cls, config: Any) -> nn.Module:
        """The model of a configuration."""
        return cls.model_class(config.model)

    def build_model(self) -> nn.Module:
        """The model with its first weights."""
        return type(self).model_class(self.model_config, seed=self.seed)

    def loader(self, *, rank: int, world_size: int, sample: int, pin_memory: bool) -> ImageLoader:
        """A rank's part of each global batch."""
        return ImageLoader(
            self.data,
            self.batch_size,
            rank=rank,
            world_size=world_size,
            sample=sample,
            workers=self.data_config.workers,
            prefetch=self.data_config.prefetch,
            pin_memory=pin_memory,
        )

    def measures(self) -> Metrics:
        """All of the task's, where anything is held out."""
        return {} if self.held_out is None else self.metrics

    def held_out_sizes(self) -> dict[str, int]:
        """Images."""
        return {} if self.held_out is None else {"images": len(self.held_out)}

    @property
    def units_per_sample(self) -> int:
        """A sample is an image."""
        return 1

    @property
    def epoch_samples(self) -> int:
        """As many as there are training images."""
        return len(self.images)

    @cached_property
    def counts(self) -> Counts:
        """Counted on no device."""
        return type(self).count(self.model_config)

    @property
    def parameters(self) -> int:
        """All of them."""
        return self.counts.total

    def least_activations(self, recomputed: bool) -> float:
        """A stream and a reading per sublayer and token; all that is kept where nothing is recomputed."""
        c = self.model_config
        return 2 * c.blocks * c.dim * c.tokens if recomputed else self.counts.activation_bytes / FLOAT32

    def flops_per_sample(self, model: nn.Module) -> float:
        """Forward and backward of one image."""
        return self.counts.flops_training

    def save_extras(self, folder: Path) -> None:
        """Names of classes and fingerprints of the images."""
        sets = {"train": self.images, **({} if self.test_images is None else {"test": self.test_images})}
        facts = {
            split: {"name": found.name, "images": len(found), "sha256": found.fingerprint}
            for split, found in sets.items()
        }
        write_json(folder / IMAGES, {"class_names": list(self.images.class_names), **facts})


def fitting(images: ImageSet, source: str, classes: int) -> ImageSet:
    """The same images, or a sentence where a model has fewer classes than they."""
    if len(images.class_names) > classes:
        raise DataError.not_allowed(
            "model.classes =", classes, f"{len(images.class_names)} or more for the classes of {source!r}"
        )
    return images
