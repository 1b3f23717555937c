"""Which diffusion a model is of: what it predicts, by which schedule, with or without variances."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch
from torch import Tensor

from siamesenorm.tasks.diffusion.losses import Denoise, Losses, flow_losses, gaussian_losses
from siamesenorm.tasks.diffusion.schedule import Schedule, ScheduleKind

Prediction = Literal["epsilon", "velocity", "flow"]


@dataclass(frozen=True)
class Process:
    """``Process("epsilon", "linear", 1000, learn_sigma=True)`` is DiT's."""

    prediction: Prediction = "epsilon"
    schedule_kind: ScheduleKind = "linear"
    timesteps: int = 1000
    learn_sigma: bool = True

    def __post_init__(self) -> None:
        if self.prediction == "flow" and self.learn_sigma:
            raise ValueError("model.learn_sigma = true is not allowed with diffusion.prediction = flow; it takes false")

    @cached_property
    def schedule(self) -> Schedule:
        """Noise levels by timestep; a flow has none."""
        return Schedule(self.schedule_kind, self.timesteps)

    def losses(self, denoise: Denoise, clean: Tensor, labels: Tensor, noise: Tensor, time: Tensor) -> Losses:
        """Losses of samples at times in [0, 1), each with its noise."""
        if self.prediction == "flow":
            return flow_losses(denoise, clean, labels, noise, time)
        t = (time * self.timesteps).to(torch.long).clamp(max=self.timesteps - 1)
        velocity = self.prediction == "velocity"
        return gaussian_losses(
            denoise, clean, labels, noise, t, self.schedule, velocity=velocity, learn_sigma=self.learn_sigma
        )

    def blind_loss(self, clean: Tensor, noise: Tensor, time: Tensor) -> float:
        """Mean squared error of the best prediction that sees the time alone: that of the mean image without noise."""
        mean, nothing = clean.mean(0, keepdim=True).expand_as(clean), torch.zeros_like(clean)

        def denoise(noisy: Tensor, t: Tensor, labels: Tensor) -> Tensor:
            if self.prediction == "flow":
                return -mean
            return self.schedule.velocity(mean, nothing, t) if self.prediction == "velocity" else nothing

        labels = torch.zeros(len(clean), dtype=torch.long)
        return float(replace(self, learn_sigma=False).losses(denoise, clean, labels, noise, time).mse.mean())
