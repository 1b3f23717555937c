"""Image classification: images and model of a run, its loss with mixing and distillation, accuracy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from siamesenorm.data.atomic import whole_file, write_json
from siamesenorm.data.errors import DataError
from siamesenorm.data.images import ImageSet, open_images
from siamesenorm.data.images.imageset import Split
from siamesenorm.data.images.loader import ImageLoader, TestImages, TrainingImages
from siamesenorm.data.images.timm_transforms import TimmTransform, import_timm, seeded
from siamesenorm.data.images.transforms import CentreCrop, Scale, Shift, Transform, per_channel
from siamesenorm.models.vit import VisionTransformer
from siamesenorm.models.vit_config import ViTConfig
from siamesenorm.models.vit_counts import activations_of_image, count_vit, flops_of_image
from siamesenorm.tasks.base import Average, Batch, Loss, Task
from siamesenorm.tasks.classification_config import (
    ClassificationEvaluationConfig,
    ClassificationLossConfig,
    ImageDataConfig,
)
from siamesenorm.tasks.confusion import Confusion
from siamesenorm.tasks.distillation import Teacher, distillation_loss

IMAGES, EVALUATION, CONFUSION = "images.json", "evaluation.json", "confusion.csv"
"""What a finished run has beside its weights."""
LIMITS = {"dim": 2**17, "blocks": 4096, "heads": 2**12, "ffn_dim": 2**20, "classes": 2**20, "channels": 3}
"""Beyond these a number is a slip of the finger, not a model."""
TOP = 5


class ClassificationTask(Task):
    """A vision Transformer learns to tell classes of images apart."""

    name = "classification"
    sections = {  # noqa: RUF012
        "model": ViTConfig,
        "data": ImageDataConfig,
        "loss": ClassificationLossConfig,
        "evaluation": ClassificationEvaluationConfig,
    }
    unit = "images"

    @classmethod
    def check(cls, config: Any) -> None:
        """Raise ValueError where sections do not fit each other; reads no data."""
        model: ViTConfig = config.model
        data: ImageDataConfig = config.data
        loss: ClassificationLossConfig = config.loss
        for name, most in LIMITS.items():
            if getattr(model, name) > most:
                raise ValueError(f"model.{name} = {getattr(model, name)} is not allowed; it takes up to {most}")
        if model.channels == 2:
            raise ValueError("model.channels = 2 is not allowed; it takes 1 or 3")
        if model.classes < 2 or model.pool == "none":
            raise ValueError(f"model.classes = {model.classes} is not allowed; a classifier takes 2 or more and a pool")
        for name in ("mean", "std"):
            values = getattr(data, name)
            if len(values) not in (1, model.channels) or (name == "std" and min(values) <= 0):
                allowed = f"1 or model.channels = {model.channels} numbers{' above 0' if name == 'std' else ''}"
                raise ValueError(f"data.{name} = {list(values)} is not allowed; it takes {allowed}")
        if model.distilled != (loss.teacher is not None):
            raise ValueError(
                f"loss.teacher = {loss.teacher or 'null'} is not allowed with model.distilled = "
                f"{str(model.distilled).lower()}; a distillation token takes a teacher, and a teacher takes one"
            )
        if (loss.mixup or loss.cutmix) and (config.train.batch_size // config.train.accumulation) % 2:
            raise ValueError(
                f"train.batch_size = {config.train.batch_size} is not allowed; mixing takes even parts of a batch"
            )

    def __init__(self, config: Any) -> None:
        self.model_config: ViTConfig = config.model
        self.data_config: ImageDataConfig = config.data
        self.loss_config: ClassificationLossConfig = config.loss
        self.evaluation: ClassificationEvaluationConfig = config.evaluation
        self.seed, self.batch_size = config.train.seed, config.train.batch_size
        data, seed = self.data_config, config.data.shuffle_seed
        self.images = self._open(data.train, "train")
        self.data = TrainingImages(
            self.images, self._augmentation(), seed=self.seed if seed is None else seed, repeats=data.repeats
        )
        self.held_out: TestImages | None = None
        if self.evaluation.every is not None:
            found = self._open(data.test or data.train, "test")
            if found.class_names != self.images.class_names:
                raise DataError(f"data.test: the classes of {found.name!r} are not those of {self.images.name!r}")
            self.held_out = TestImages(found, transform_of(self.model_config, data), self.evaluation.images)
        self.confusion: Confusion | None = None
        loss = self.loss_config
        self.mixer = make_mixer(loss, self.model_config.classes) if loss.mixup or loss.cutmix else None
        self.teacher = (
            None if loss.teacher is None else Teacher(loss.teacher, loss.teacher_weights, self.model_config.classes)
        )

    def _open(self, source: str, split: Split) -> ImageSet:
        data, model = self.data_config, self.model_config
        images = open_images(
            source,
            split,
            held_out=data.held_out if data.test is None else None,
            image_column=data.image_column,
            label_column=data.label_column,
            channels=model.channels,
        )
        if len(images.class_names) > model.classes:
            raise DataError(
                f"model.classes = {model.classes} is not allowed; it takes {len(images.class_names)} or more "
                f"for the classes of {source!r}"
            )
        return images

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
    def model_of(cls, config: Any) -> VisionTransformer:
        """The vision Transformer of a configuration."""
        return VisionTransformer(config.model)

    def build_model(self) -> nn.Module:
        """A vision Transformer with its first weights."""
        return VisionTransformer(self.model_config, seed=self.seed)

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

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Cross-entropy with the labels, mixed and smoothed where asked for, and with the teacher's answer."""
        images, target = batch["image"], batch["label"]
        if self.mixer is not None:
            with seeded(int(torch.randint(2**62, ()))):  # the engine has seeded torch for this step and process
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
    def evaluate(
        self, model: nn.Module, *, rank: int, world_size: int, average: Average, final: bool
    ) -> dict[str, float]:
        """Loss, accuracy and top-5 accuracy of the held-out images; `confusion` then has the classes."""
        if self.held_out is None:
            return {}
        classes, device = self.model_config.classes, next(model.parameters()).device
        counts = torch.zeros(classes * classes, dtype=torch.float64, device=device)
        nats = torch.zeros((), dtype=torch.float64, device=device)
        top = torch.zeros((), dtype=torch.float64, device=device)
        for batch in self.held_out.batches(self.evaluation.at_once, rank=rank, world_size=world_size):
            logits, labels = model(batch["image"].to(device)).float(), batch["label"].to(device)
            nats += F.cross_entropy(logits, labels, reduction="sum").double()
            counts += torch.bincount(labels * classes + logits.argmax(1), minlength=classes * classes)
            best = logits.topk(min(TOP, classes), dim=1).indices
            top += (best == labels[:, None]).any(dim=1).sum()
        matrix = counts.reshape(classes, classes).cpu().numpy()
        sums = {"nats": nats.item(), "top": top.item(), "images": float(matrix.sum()), "right": float(np.trace(matrix))}
        if world_size > 1 and classes <= 256:  # a number for every pair has to go around
            whole = average({str(place): float(value) for place, value in enumerate(matrix.ravel())})
            matrix = np.array(list(whole.values())).reshape(classes, classes) * world_size
        means = average(sums)
        total = max(means["images"], 1e-9)
        names = self.images.class_names
        self.confusion = Confusion(np.rint(matrix), names) if world_size == 1 or classes <= 256 else None
        metrics = {"loss": means["nats"] / total, "accuracy": means["right"] / total}
        if classes > TOP:
            metrics["top5"] = means["top"] / total
        return metrics

    @property
    def units_per_sample(self) -> int:
        """A sample is an image."""
        return 1

    @property
    def epoch_samples(self) -> int:
        """As many as there are training images."""
        return len(self.images)

    @property
    def parameters(self) -> int:
        """Counted on no device."""
        return count_vit(self.model_config).total

    def least_activations(self, recomputed: bool) -> float:
        """A stream and a reading per sublayer and token; all the inside too where nothing is recomputed."""
        c = self.model_config
        return 2 * c.blocks * c.dim * c.tokens if recomputed else activations_of_image(c)

    def flops_per_sample(self, model: nn.Module) -> float:
        """Forward and backward of one image."""
        return 3 * flops_of_image(self.model_config)

    def chance_loss(self) -> float | None:
        """Entropy of the frequencies of classes, smoothed as the labels are; mixing does not change them."""
        counts = np.bincount(self.images.labels, minlength=self.model_config.classes)
        smoothing = self.loss_config.smoothing
        shares = (1 - smoothing) * counts / counts.sum() + smoothing / self.model_config.classes
        shares = shares[shares > 0]
        return float(-(shares * np.log(shares)).sum())

    @classmethod
    def for_evaluation(cls, config: Any) -> Task:
        """Without augmentation, mixing and teacher, which only training needs."""
        plain = {"data": config.data.model_copy(update={"augment": "none"}), "loss": ClassificationLossConfig()}
        return super().for_evaluation(config.model_copy(update=plain))

    @classmethod
    def header(cls, config: Any, folder: Path) -> dict[str, str]:
        """How images are made ready, and the names of classes."""
        names = class_names_of(config, folder)
        return {"data": json.dumps(config.data.model_dump(mode="json")), "class_names": json.dumps(names)}

    def save_extras(self, folder: Path) -> None:
        """Names of classes and fingerprints of the images; what the last evaluation found, class by class."""
        sets = {"train": self.images, **({} if self.held_out is None else {"test": self.held_out.images})}
        facts = {
            split: {"name": found.name, "images": len(found), "sha256": found.fingerprint}
            for split, found in sets.items()
        }
        write_json(folder / IMAGES, {"class_names": list(self.images.class_names), **facts})
        if self.confusion is not None:
            save_confusion(self.confusion, folder)


def class_names_of(config: Any, folder: Path) -> list[str]:
    """Names of a run's classes: as it left them when it finished, or as its images have them, or numbers."""
    try:
        names = json.loads((folder / IMAGES).read_bytes())["class_names"]
        return [str(name) for name in names]
    except (OSError, ValueError, KeyError, TypeError):
        pass
    try:
        return list(open_images(config.data.train, channels=config.model.channels).class_names)
    except DataError:
        return [str(number) for number in range(config.model.classes)]


def save_confusion(confusion: Confusion, folder: Path) -> None:
    """evaluation.json and confusion.csv."""
    write_json(folder / EVALUATION, confusion.as_dict())
    with whole_file(folder / CONFUSION) as file:
        file.write(confusion.as_csv().encode())


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
