"""The sections of a classification run: images and their augmentation, the loss, what is measured."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from siamesenorm.data.images.transforms import Interpolation
from siamesenorm.tasks.base import AsTuple, Section
from siamesenorm.tasks.images import ImageSourceConfig

Numbers = Annotated[tuple[float, ...], AsTuple]


class ImageDataConfig(ImageSourceConfig):
    """The images that a classifier sees, and how they are changed before it does."""

    mean: Numbers = Field(default=(0.5,), min_length=1, max_length=3, description="Taken from every channel (0 to 1).")
    std: Numbers = Field(default=(0.5,), min_length=1, max_length=3, description="Each channel is divided by this.")
    interpolation: Interpolation = Field(default="bicubic", description="How images are resized.")
    crop: float = Field(
        default=1.0, gt=0, le=1, description="Share of a test image's shorter side that is seen, in the middle."
    )
    augment: Literal["none", "shift", "timm"] = Field(
        default="none",
        description="shift: moves of a few pixels and mirror images; timm: DeiT's crops, RandAugment, erasing.",
    )
    shift: int = Field(default=1, ge=0, le=64, description="Pixels that shift moves an image by, at most.")
    flip: float = Field(default=0.0, ge=0, le=1, description="Probability of a mirror image (shift, timm).")
    rand_augment: str | None = Field(
        default="rand-m9-mstd0.5-inc1", description="timm's policy, such as rand-m9-mstd0.5-inc1 (timm)."
    )
    color_jitter: float = Field(default=0.3, ge=0, le=1, description="Colour jitter where rand_augment is null (timm).")
    erasing: float = Field(default=0.25, ge=0, le=1, description="Probability that a part is erased (timm).")
    repeats: int = Field(default=1, ge=1, le=64, description="Repeated augmentation: times an image comes in a row.")


class ClassificationLossConfig(Section):
    """What a classifier is asked for: labels, mixed or smoothed, and perhaps a teacher's."""

    smoothing: float = Field(default=0.0, ge=0, lt=1, description="Label smoothing.")
    mixup: float = Field(default=0.0, ge=0, le=100, description="Alpha of mixup (needs timm); 0: none.")
    cutmix: float = Field(default=0.0, ge=0, le=100, description="Alpha of CutMix (needs timm); 0: none.")
    mix_probability: float = Field(default=1.0, ge=0, le=1, description="Of mixing a batch at all.")
    cutmix_share: float = Field(default=0.5, ge=0, le=1, description="Of CutMix instead of mixup, where both are on.")
    teacher: str | None = Field(
        default=None, min_length=1, description="To learn from, with model.distilled: a run folder, or timm:NAME."
    )
    teacher_weights: str | None = Field(
        default=None, description="A timm teacher's safetensors file; null: timm downloads its own."
    )
    distillation: Literal["hard", "soft"] = Field(
        default="hard", description="hard: the teacher's class is a second label; soft: its probabilities are matched."
    )
    alpha: float = Field(default=0.5, ge=0, le=1, description="Weight of the teacher against the labels.")
    tau: float = Field(default=1.0, gt=0, description="Temperature of soft distillation.")

    @property
    def mixes_pairs(self) -> bool:
        """Whether samples are mixed in pairs, and so computed in even numbers."""
        return bool(self.mixup or self.cutmix)


class ClassificationEvaluationConfig(Section):
    """What is measured on held-out images: loss, accuracy, top-5 accuracy, each class's."""

    every: int | None = Field(default=1000, ge=1, description="Steps between evaluations, also at the end; null: none.")
    images: int | None = Field(default=None, ge=1, description="Images, evenly spread; null: all.")
    at_once: int = Field(default=256, ge=1, le=2**20, description="Images that a rank takes at a time.")
