"""Image classification: images and model of a run, its loss with mixing and distillation, accuracy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from siamesenorm.data.atomic import write_json, write_whole
from siamesenorm.data.images.loader import TestImages, TrainingImages
from siamesenorm.data.images.timm_transforms import TimmTransform, import_timm
from siamesenorm.data.images.transforms import CentreCrop, Scale, Shift, Transform, per_channel
from siamesenorm.data.seeding import seeded
from siamesenorm.errors import FieldError
from siamesenorm.models.vit import VisionTransformer, ViTConfig, count_vit
from siamesenorm.tasks.base import ALONE, Batch, Loss, Ranks, Task, check_limits
from siamesenorm.tasks.classification_config import (
    ClassificationEvaluationConfig,
    ClassificationLossConfig,
    ImageDataConfig,
)
from siamesenorm.tasks.confusion import Confusion
from siamesenorm.tasks.distillation import Teacher, distillation_loss
from siamesenorm.tasks.images import ImageTask
from siamesenorm.tasks.metrics import Metric, Metrics, entropy

EVALUATION, CONFUSION = "evaluation.json", "confusion.csv"
"""What the last evaluation found, beside a finished run's weights."""
TOP = 5


class ClassificationTask(ImageTask):
    """A vision Transformer learns to tell classes of images apart."""

    name = "classification"
    model_class = VisionTransformer
    count = count_vit
    sections = {  # noqa: RUF012
        "model": ViTConfig,
        "data": ImageDataConfig,
        "loss": ClassificationLossConfig,
        "evaluation": ClassificationEvaluationConfig,
    }
    metrics = {  # noqa: RUF012
        "loss": Metric(higher=False, of="images", unit="nats"),
        "accuracy": Metric(higher=True, of="images"),
        "top5": Metric(higher=True, of="images"),
    }
    chance = "what frequencies of classes alone give"
    model_config: ViTConfig
    data_config: ImageDataConfig
    evaluation: ClassificationEvaluationConfig

    @classmethod
    def check(cls, config: Any) -> None:
        """Raise ValueError where sections do not fit each other; reads no data."""
        model: ViTConfig = config.model
        data: ImageDataConfig = config.data
        loss: ClassificationLossConfig = config.loss
        check_limits(model, classes=2**20, channels=3)
        if model.channels == 2:
            raise FieldError.not_allowed("model.channels =", 2, "1 or 3")
        if model.classes < 2 or model.pool == "none":
            raise FieldError.refused("model.classes =", model.classes, "a classifier takes 2 or more and a pool")
        for name in ("mean", "std"):
            values = getattr(data, name)
            if len(values) not in (1, model.channels) or (name == "std" and min(values) <= 0):
                allowed = f"1 or model.channels = {model.channels} numbers{' above 0' if name == 'std' else ''}"
                raise FieldError.not_allowed(f"data.{name} =", list(values), allowed)
        if model.distilled != (loss.teacher is not None):
            raise ValueError(
                f"loss.teacher = {loss.teacher or 'null'} is not allowed with model.distilled = "
                f"{str(model.distilled).lower()}; a distillation token takes a teacher, and a teacher takes one"
            )
        for name in ("batch_size", "micro_batch_size"):
            size = getattr(config.train, name)
            if (loss.mixup or loss.cutmix) and isinstance(size, int) and size % 2:
                raise FieldError.refused(f"train.{name} =", size, "mixing takes even numbers of images")

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.loss_config: ClassificationLossConfig = config.loss
        data = self.data_config
        self.data = TrainingImages(self.images, self._augmentation(), seed=self.shuffle_seed, repeats=data.repeats)
        self.held_out: TestImages | None = None
        if self.test_images is not None:
            plain = transform_of(self.model_config, data)
            self.held_out = TestImages(self.test_images, plain, self.evaluation.images)
        self.confusion: Confusion | None = None
        loss = self.loss_config
        self.mixes_pairs = loss.mixes_pairs
        self.mixer = make_mixer(loss, self.model_config.classes) if self.mixes_pairs else None
        self.teacher = (
            None if loss.teacher is None else Teacher(loss.teacher, loss.teacher_weights, self.model_config.classes)
        )

    def _augmentation(self) -> Transform:
        data, model = self.data_config, self.model_config
        plain = transform_of(model, data)
        if data.augment == "timm":
            return TimmTransform(
                model.image_shape,
                model.channels,
                plain.scale,
                flip=data.flip,
                rand_augment=data.rand_augment,
                color_jitter=data.color_jitter,
                erasing=data.erasing,
                interpolation=data.interpolation,
            )
        return plain if data.augment == "none" else Shift(plain, data.shift, data.flip)

    @classmethod
    def sample_loss(cls, config: Any, model: nn.Module, rows: int) -> Tensor:
        """Of images of the first class; a teacher is not asked."""
        shape = (rows, config.model.channels, *config.model.image_shape)
        output: Tensor | tuple[Tensor, Tensor] = model(torch.zeros(shape))
        both = output if isinstance(output, tuple) else (output,)
        target = torch.zeros(rows, dtype=torch.long)
        return torch.stack([F.cross_entropy(logits, target) for logits in both]).sum()

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Cross-entropy with the labels, mixed and smoothed where asked for, and with the teacher's answer."""
        images, target = batch["image"], batch["label"]
        if self.mixer is not None:
            with seeded(int(torch.randint(2**62, ())), gpus=False):  # the engine has seeded torch for this step
                images, target = self.mixer(images.clone(), target)
        output: Tensor | tuple[Tensor, Tensor] = model(images)
        logits, taught = output if isinstance(output, tuple) else (output, None)
        # With mixed labels the smoothing is in them.
        smoothing = 0.0 if self.mixer is not None else self.loss_config.smoothing
        loss = F.cross_entropy(logits, target, label_smoothing=smoothing)
        metrics = {"loss": loss.detach()}
        if taught is None or self.teacher is None:
            return Loss(loss, metrics)
        config = self.loss_config
        learnt = distillation_loss(taught, self.teacher.logits(images), config.distillation, config.tau)
        metrics["distillation"] = learnt.detach()
        return Loss((1 - config.alpha) * loss + config.alpha * learnt, metrics)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, ranks: Ranks = ALONE) -> dict[str, float]:
        """Loss, accuracy and top-5 accuracy of the held-out images; `confusion` then has the classes."""
        if self.held_out is None:
            return {}
        classes, device = self.model_config.classes, next(model.parameters()).device
        counts = torch.zeros(classes * classes, dtype=torch.float64, device=device)
        nats = torch.zeros((), dtype=torch.float64, device=device)
        top = torch.zeros((), dtype=torch.float64, device=device)
        for batch in self.held_out.batches(self.evaluation.at_once, rank=ranks.rank, world_size=ranks.world_size):
            counted = batch["counted"].to(device)
            logits, labels = model(batch["image"].to(device)).float()[counted], batch["label"].to(device)[counted]
            nats += F.cross_entropy(logits, labels, reduction="sum").double()
            counts += torch.bincount(labels * classes + logits.argmax(1), minlength=classes * classes)
            best = logits.topk(min(TOP, classes), dim=1).indices
            top += (best == labels[:, None]).any(dim=1).sum()
        matrix = counts.reshape(classes, classes).cpu().numpy()
        sums = {"nats": nats.item(), "top": top.item(), "images": float(matrix.sum()), "right": float(np.trace(matrix))}
        if ranks.gather is not None:
            matrix = np.sum(ranks.gather(matrix), axis=0)
        means = ranks.average(sums)
        total = max(means["images"], 1e-9)
        names = self.images.class_names
        self.confusion = Confusion(matrix, names) if ranks.world_size == 1 or ranks.gather is not None else None
        metrics = {"loss": means["nats"] / total, "accuracy": means["right"] / total}
        if classes > TOP:
            metrics["top5"] = means["top"] / total
        return metrics

    def measures(self) -> Metrics:
        """The best five are not asked for where classes are so few."""
        few = self.model_config.classes <= TOP
        return {name: metric for name, metric in super().measures().items() if not (few and name == "top5")}

    def chance_loss(self) -> float | None:
        """Entropy of the frequencies of classes, smoothed as the labels are; mixing does not change them."""
        counts = np.bincount(self.images.labels, minlength=self.model_config.classes)
        smoothing = self.loss_config.smoothing
        return entropy((1 - smoothing) * counts / counts.sum() + smoothing / self.model_config.classes)

    @classmethod
    def for_evaluation(cls, config: Any) -> Task:
        """Without augmentation, mixing and teacher, which only training needs."""
        plain = {"data": config.data.model_copy(update={"augment": "none"}), "loss": ClassificationLossConfig()}
        return super().for_evaluation(config.model_copy(update=plain))

    @classmethod
    def header(cls, config: Any, folder: Path) -> dict[str, str]:
        """How images are made ready, and the names of classes."""
        names = cls.class_names(config, folder)
        return {"data": json.dumps(config.data.model_dump(mode="json")), "class_names": json.dumps(names)}

    def save_extras(self, folder: Path) -> None:
        """Names of classes and fingerprints of the images; what the last evaluation found, class by class."""
        super().save_extras(folder)
        if self.confusion is not None:
            save_confusion(self.confusion, folder)


def save_confusion(confusion: Confusion, folder: Path) -> None:
    """evaluation.json and confusion.csv."""
    write_json(folder / EVALUATION, confusion.as_dict())
    write_whole(folder / CONFUSION, confusion.as_csv())


def transform_of(model: ViTConfig, data: ImageDataConfig) -> CentreCrop:
    """How images are made ready to be evaluated, or predicted from."""
    scale = Scale(per_channel(data.mean, model.channels), per_channel(data.std, model.channels))
    return CentreCrop(model.image_shape, model.channels, scale, data.crop, data.interpolation)


def make_mixer(loss: ClassificationLossConfig, classes: int) -> Any:
    """timm's mixup and CutMix, which give soft labels, smoothed."""
    mixup = import_timm("timm.data.mixup", "loss.mixup and loss.cutmix")
    return mixup.Mixup(
        mixup_alpha=loss.mixup,
        cutmix_alpha=loss.cutmix,
        prob=loss.mix_probability,
        switch_prob=loss.cutmix_share,
        label_smoothing=loss.smoothing,
        num_classes=classes,
    )
