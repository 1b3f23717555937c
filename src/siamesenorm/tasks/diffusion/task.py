"""The diffusion task: data and model of a run, its loss, the held-out loss by time, and the distance of samples."""

from __future__ import annotations

import json
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from siamesenorm.data.images import ImageSet
from siamesenorm.data.images.imageset import Split
from siamesenorm.data.latents import LatentImages, is_latents, open_latents
from siamesenorm.errors import DataError, FieldError
from siamesenorm.models.dit import DiT, DiTConfig, count_dit
from siamesenorm.tasks.base import ALONE, Batch, Loss, Ranks, check_limits
from siamesenorm.tasks.diffusion.config import DiffusionDataConfig, DiffusionEvaluationConfig, ProcessConfig
from siamesenorm.tasks.diffusion.data import (
    NoisyImages,
    NoisyTestImages,
    augmentation_of,
    check_shape,
    to_bytes,
    transform_of,
)
from siamesenorm.tasks.diffusion.process import Process
from siamesenorm.tasks.diffusion.sampling import Sampler, sample
from siamesenorm.tasks.fidelity import ClassifierFidelity
from siamesenorm.tasks.fidelity.image_batches import Images
from siamesenorm.tasks.images import ImageTask, fitting
from siamesenorm.tasks.metrics import Metric, Metrics
from siamesenorm.tasks.sharing import Sharing

QUARTERS = 4
BLIND_IMAGES = 256
"""Images that the mean image is taken of."""


class DiffusionTask(ImageTask):
    """A diffusion Transformer learns to make images of classes."""

    name = "diffusion"
    model_class = DiT
    count = count_dit
    sections = {  # noqa: RUF012
        "model": DiTConfig,
        "data": DiffusionDataConfig,
        "diffusion": ProcessConfig,
        "evaluation": DiffusionEvaluationConfig,
    }
    metrics = {  # noqa: RUF012
        "loss": Metric(higher=False, of="images"),
        "mse": Metric(higher=False, of="images"),
        "mse/": Metric(higher=False, of="images"),
        "vlb": Metric(higher=False, of="images"),
        "frechet": Metric(higher=False, of="samples"),
        "sample_accuracy": Metric(higher=True, of="samples"),
    }
    chance = "what a prediction that does not look at its input gives"
    chance_of = "mse"
    model_config: DiTConfig
    data_config: DiffusionDataConfig
    evaluation: DiffusionEvaluationConfig

    @classmethod
    def check(cls, config: Any) -> None:
        """Raise ValueError where sections do not fit each other; reads no data."""
        model: DiTConfig = config.model
        evaluation: DiffusionEvaluationConfig = config.evaluation
        check_limits(model, classes=2**20, input_size=2**14)
        process = process_of(config)
        if evaluation.samples and evaluation.guidance != 1 and not model.class_dropout:
            raise FieldError.not_allowed(
                "evaluation.guidance =", evaluation.guidance, "1", "with model.class_dropout = 0"
            )
        try:
            evaluation_sampler(evaluation, process).check(process)
        except DataError as error:  # it speaks of a sampler's fields, steps among them
            raise ValueError(f"evaluation.{str(error).replace('steps:', 'sampling_steps:', 1)}") from None

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self.process = process_of(config)
        model, data = self.model_config, self.data_config
        self.data = NoisyImages(self.images, augmentation_of(model, data, self.images), seed=self.shuffle_seed)
        self.held_out: NoisyTestImages | None = None
        if self.test_images is not None:
            plain = transform_of(model, self.test_images)
            self.held_out = NoisyTestImages(self.test_images, plain, self.evaluation.images)
        samples = self.evaluation.samples
        if samples and isinstance(self.images, LatentImages):
            allowed = "0, and decoded samples are measured by siamesenorm fid"
            raise DataError.not_allowed("evaluation.samples =", samples, allowed, "for latents")
        if samples and self.images.size != (model.input_size,) * 2:
            raise DataError.refused(
                "evaluation.samples =",
                samples,
                f"samples are compared with images of model.input_size = {model.input_size}, and those of "
                f"{data.train!r} are not",
            )

    @classmethod
    def open_split(cls, config: Any, source: str, split: Split) -> ImageSet:
        """Images, or latents where the source is a folder of them, checked against the model."""
        if is_latents(source):
            images = fitting(open_latents(source, split), source, config.model.classes)
        else:
            images = super().open_split(config, source, split)
        check_shape(images, source, config.model)
        return images

    @classmethod
    def sample_loss(cls, config: Any, model: nn.Module, rows: int) -> Tensor:
        """Of images and noise of the model's size."""
        c: DiTConfig = config.model
        image = torch.zeros(rows, c.channels, c.input_size, c.input_size)
        label, time = torch.zeros(rows, dtype=torch.long), torch.zeros(rows)
        return process_of(config).losses(model, image, label, torch.zeros_like(image), time).total.mean()

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """Mean squared error of the prediction, and the bound's term where variances are learnt."""
        losses = self.process.losses(model, batch["image"], batch["label"], batch["noise"], batch["time"])
        total = losses.total.mean()
        metrics = {"loss": total.detach()}
        if losses.vlb is not None:
            metrics |= {"mse": losses.mse.detach().mean(), "vlb": losses.vlb.detach().mean()}
        return Loss(total, metrics)

    @torch.no_grad()
    def evaluate(self, model: nn.Module, ranks: Ranks = ALONE) -> dict[str, float]:
        """Held-out losses, whole and by quarters of time, on fixed noise; the distance of samples where asked for."""
        metrics = self._held_out_losses(model, ranks)
        if self.evaluation.samples:
            metrics |= self._fidelity(model, ranks.sharing(model))
        return metrics

    def _held_out_losses(self, model: nn.Module, ranks: Ranks) -> dict[str, float]:
        if self.held_out is None:
            return {}
        device = next(model.parameters()).device
        sums: dict[str, Tensor] = {}

        def add(name: str, values: Tensor, counted: Tensor) -> None:
            pair = torch.stack([values.where(counted, 0).sum(), counted.sum()]).double()
            sums[name] = sums[name] + pair if name in sums else pair

        for batch in self.held_out.batches(self.evaluation.at_once, rank=ranks.rank, world_size=ranks.world_size):
            given = {name: values.to(device) for name, values in batch.items()}
            losses = self.process.losses(model, given["image"], given["label"], given["noise"], given["time"])
            counted = given["counted"]
            add("loss", losses.total, counted)
            add("mse", losses.mse, counted)
            if losses.vlb is not None:
                add("vlb", losses.vlb, counted)
            for quarter in range(QUARTERS):
                inside = (given["time"] * QUARTERS).long() == quarter
                add(f"mse/quarter_{quarter + 1}", losses.mse, inside & counted)
        flat = {f"{name}|{k}": float(pair[k]) for name, pair in sums.items() for k in (0, 1)}
        means = ranks.average(flat)
        return {name: means[f"{name}|0"] / means[f"{name}|1"] for name in sums if means[f"{name}|1"]}

    def measures(self) -> Metrics:
        """By quarters of time too; variances and samples where there are any."""
        if self.held_out is None:
            return {}
        left_out = ["mse/"] if self.process.learn_sigma else ["mse/", "vlb"]
        left_out += [] if self.evaluation.samples else ["frechet", "sample_accuracy"]
        quarters = {f"mse/quarter_{quarter + 1}": self.metrics["mse/"] for quarter in range(QUARTERS)}
        return {name: metric for name, metric in {**self.metrics, **quarters}.items() if name not in left_out}

    def held_out_sizes(self) -> dict[str, int]:
        """Images, and samples where there are any."""
        images = super().held_out_sizes()
        return {**images, "samples": self.evaluation.samples} if images and self.evaluation.samples else images

    def chance_loss(self) -> float | None:
        """1 of the noise, which has this variance; of other predictions, that of the mean image."""
        if self.process.prediction == "epsilon":
            return 1.0
        batch = self.data.batch(np.arange(min(BLIND_IMAGES, len(self.images)), dtype=np.int64))
        return self.process.blind_loss(batch["image"], batch["noise"], batch["time"])

    @cached_property
    def fidelity(self) -> ClassifierFidelity:
        """The classifier whose features samples and training images are compared in."""
        return ClassifierFidelity(self.images)

    def _fidelity(self, model: nn.Module, sharing: Sharing) -> dict[str, float]:
        """Processes share the samples, batch by batch; all of them measure all."""
        evaluation, classes = self.evaluation, len(self.images.class_names)
        labels = np.arange(evaluation.samples) % classes

        def sampled(first: int) -> Images:
            return to_bytes(self.samples(model, torch.from_numpy(labels[first : first + evaluation.at_once]), first))

        samples = list(sharing.each(range(0, len(labels), evaluation.at_once), sampled))
        found = self.fidelity(np.concatenate(samples), labels)
        return {"frechet": found["frechet"], "sample_accuracy": found["accuracy"]}

    @classmethod
    def header(cls, config: Any, folder: Path) -> dict[str, str]:
        """What the model predicts, and under which noise."""
        return {"diffusion": json.dumps(config.diffusion.model_dump(mode="json"))}

    def samples(self, model: nn.Module, labels: Tensor, first: int = 0) -> Tensor:
        """Samples as evaluation makes them, about ±1."""
        c = self.model_config
        shape = (c.channels, c.input_size, c.input_size)
        sampler = evaluation_sampler(self.evaluation, self.process)
        device = next(model.parameters()).device
        unconditional = c.classes if c.class_dropout else None
        return sample(
            model, labels.to(device), shape, self.process, sampler, unconditional=unconditional, first=first
        ).images


def process_of(config: Any) -> Process:
    """The process of a run's configuration."""
    given: ProcessConfig = config.diffusion
    return Process(given.prediction, given.schedule, given.timesteps, config.model.learn_sigma)


def evaluation_sampler(evaluation: DiffusionEvaluationConfig, process: Process) -> Sampler:
    """What evaluation samples with: few steps, since it does so often."""
    name = evaluation.sampler or ("euler" if process.prediction == "flow" else "dpm")
    return Sampler(name, evaluation.sampling_steps, evaluation.guidance, clip=True)
