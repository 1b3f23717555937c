"""The diffusion task: data and model of a run, its loss, the held-out loss by time, and the distance of samples."""

from __future__ import annotations

from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from siamesenorm.data.atomic import write_json
from siamesenorm.data.errors import DataError
from siamesenorm.data.images.loader import ImageLoader
from siamesenorm.data.latents import LatentImages
from siamesenorm.models.dit import DiT
from siamesenorm.models.dit_config import DiTConfig
from siamesenorm.models.dit_counts import activations_of_dit, count_dit, flops_of_dit
from siamesenorm.tasks.base import Average, Batch, Loss, Task
from siamesenorm.tasks.diffusion.config import DiffusionDataConfig, DiffusionEvaluationConfig, ProcessConfig
from siamesenorm.tasks.diffusion.data import (
    NoisyImages,
    NoisyTestImages,
    augmentation_of,
    open_source,
    to_bytes,
    transform_of,
)
from siamesenorm.tasks.diffusion.process import Process
from siamesenorm.tasks.diffusion.sampling import Sampler, sample
from siamesenorm.tasks.fidelity import ClassifierFidelity

CLASSES = "classes.json"
QUARTERS = 4
LIMITS = {"dim": 2**17, "blocks": 4096, "heads": 2**12, "ffn_dim": 2**20, "classes": 2**20, "input_size": 2**14}
"""Beyond these a number is a slip of the finger, not a model."""


class DiffusionTask(Task):
    """A diffusion Transformer learns to make images of classes."""

    name = "diffusion"
    sections = {  # noqa: RUF012
        "model": DiTConfig,
        "data": DiffusionDataConfig,
        "diffusion": ProcessConfig,
        "evaluation": DiffusionEvaluationConfig,
    }
    unit = "images"

    @classmethod
    def check(cls, config: Any) -> None:
        """Raise ValueError where sections do not fit each other; reads no data."""
        model: DiTConfig = config.model
        evaluation: DiffusionEvaluationConfig = config.evaluation
        for name, most in LIMITS.items():
            if getattr(model, name) > most:
                raise ValueError(f"model.{name} = {getattr(model, name)} is not allowed; it takes up to {most}")
        process = process_of(config)
        if evaluation.samples and evaluation.guidance != 1 and not model.class_dropout:
            raise ValueError(
                f"evaluation.guidance = {evaluation.guidance} is not allowed with model.class_dropout = 0; it takes 1"
            )
        evaluation_sampler(evaluation, process).check(process)

    def __init__(self, config: Any) -> None:
        self.model_config: DiTConfig = config.model
        self.data_config: DiffusionDataConfig = config.data
        self.evaluation: DiffusionEvaluationConfig = config.evaluation
        self.seed, self.batch_size = config.train.seed, config.train.batch_size
        self.process = process_of(config)
        model, data = self.model_config, self.data_config
        self.images = open_source(model, data, data.train, "train")
        shuffle = self.seed if data.shuffle_seed is None else data.shuffle_seed
        self.data = NoisyImages(self.images, augmentation_of(model, data, self.images), seed=shuffle)
        self.held_out: NoisyTestImages | None = None
        if self.evaluation.every is not None:
            found = open_source(model, data, data.test or data.train, "test")
            self.held_out = NoisyTestImages(found, transform_of(model, found), self.evaluation.images)
        if self.evaluation.samples and isinstance(self.images, LatentImages):
            raise DataError(
                f"evaluation.samples = {self.evaluation.samples} is not allowed for latents; it takes 0, "
                "and decoded samples are measured by siamesenorm fid"
            )
        if self.evaluation.samples and self.images.size != (model.input_size,) * 2:
            raise DataError(
                f"evaluation.samples = {self.evaluation.samples} is not allowed; samples are compared with images of "
                f"model.input_size = {model.input_size}, and those of {data.train!r} are not"
            )

    @classmethod
    def model_of(cls, config: Any) -> DiT:
        """The diffusion Transformer of a configuration."""
        return DiT(config.model)

    def build_model(self) -> nn.Module:
        """A diffusion Transformer with its first weights."""
        return DiT(self.model_config, seed=self.seed)

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
        """Mean squared error of the prediction, and the bound's term where variances are learnt."""
        losses = self.process.losses(model, batch["image"], batch["label"], batch["noise"], batch["time"])
        total = losses.total.mean()
        metrics = {"loss": total.detach()}
        if losses.vlb is not None:
            metrics |= {"mse": losses.mse.detach().mean(), "vlb": losses.vlb.detach().mean()}
        return Loss(total, metrics)

    @torch.no_grad()
    def evaluate(
        self, model: nn.Module, *, rank: int, world_size: int, average: Average, final: bool
    ) -> dict[str, float]:
        """Held-out losses, whole and by quarters of time, on fixed noise; the distance of samples where asked for."""
        metrics = self._held_out_losses(model, rank, world_size, average)
        if self.evaluation.samples:
            metrics |= self._fidelity(model)
        return metrics

    def _held_out_losses(self, model: nn.Module, rank: int, world_size: int, average: Average) -> dict[str, float]:
        if self.held_out is None:
            return {}
        device = next(model.parameters()).device
        sums: dict[str, Tensor] = {}

        def add(name: str, values: Tensor, counted: Tensor) -> None:
            pair = torch.stack([(values * counted).sum(), counted.sum()]).double()
            sums[name] = sums[name] + pair if name in sums else pair

        for batch in self.held_out.batches(self.evaluation.at_once, rank=rank, world_size=world_size):
            given = {name: values.to(device) for name, values in batch.items()}
            losses = self.process.losses(model, given["image"], given["label"], given["noise"], given["time"])
            all_count = torch.ones_like(losses.mse)
            add("loss", losses.total, all_count)
            add("mse", losses.mse, all_count)
            if losses.vlb is not None:
                add("vlb", losses.vlb, all_count)
            for quarter in range(QUARTERS):
                inside = (given["time"] * QUARTERS).long() == quarter
                add(f"mse/quarter_{quarter + 1}", losses.mse, inside.to(losses.mse))
        flat = {f"{name}|{k}": float(pair[k]) for name, pair in sums.items() for k in (0, 1)}
        means = average(flat)
        return {name: means[f"{name}|0"] / max(means[f"{name}|1"], 1e-9) for name in sums}

    @cached_property
    def fidelity(self) -> ClassifierFidelity:
        """The classifier whose features samples and training images are compared in."""
        return ClassifierFidelity(self.images)

    def _fidelity(self, model: nn.Module) -> dict[str, float]:
        """Every process makes the same samples: a sharded model needs all of them for a pass anyway."""
        evaluation, classes = self.evaluation, len(self.images.class_names)
        labels = np.arange(evaluation.samples) % classes
        made = [
            to_bytes(self.samples(model, torch.from_numpy(labels[first : first + evaluation.at_once]), first))
            for first in range(0, len(labels), evaluation.at_once)
        ]
        found = self.fidelity(np.concatenate(made), labels)
        return {"frechet": found["frechet"], "sample_accuracy": found["accuracy"]}

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
        return count_dit(self.model_config).total

    def least_activations(self, recomputed: bool) -> float:
        """A stream and a reading per sublayer and token; all the inside too where nothing is recomputed."""
        c = self.model_config
        return 2 * c.blocks * c.dim * c.tokens if recomputed else activations_of_dit(c)

    def flops_per_sample(self, model: nn.Module) -> float:
        """Forward and backward of one image."""
        return 3 * flops_of_dit(self.model_config)

    def save_extras(self, folder: Path) -> None:
        """Names of classes and a fingerprint of the images."""
        facts = {"name": self.images.name, "images": len(self.images), "sha256": self.images.fingerprint}
        write_json(folder / CLASSES, {"class_names": list(self.images.class_names), "train": facts})


def process_of(config: Any) -> Process:
    """The process of a run's configuration."""
    given: ProcessConfig = config.diffusion
    return Process(given.prediction, given.schedule, given.timesteps, config.model.learn_sigma)


def evaluation_sampler(evaluation: DiffusionEvaluationConfig, process: Process) -> Sampler:
    """What evaluation samples with: few steps, since it does so often."""
    name = evaluation.sampler or ("euler" if process.prediction == "flow" else "dpm")
    return Sampler(name, evaluation.sampling_steps, evaluation.guidance, clip=True)
