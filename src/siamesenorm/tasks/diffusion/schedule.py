"""Gaussian diffusion's schedule and closed forms (arXiv 2006.11239): noise levels by timestep, and the posterior.

With ``a_t = 1 - b_t`` and ``A_t = a_0 · … · a_t``, all in float64::

    q(x_t | x_0)        = N(sqrt(A_t) x_0, 1 - A_t)
    q(x_t-1 | x_t, x_0) = N(u x_0 + w x_t, b_t (1 - A_t-1) / (1 - A_t))
        u = sqrt(A_t-1) b_t / (1 - A_t)        w = sqrt(a_t) (1 - A_t-1) / (1 - A_t)
"""

from __future__ import annotations

import math
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from siamesenorm.errors import FieldError

ScheduleKind = Literal["linear", "cosine"]


def linear_betas(timesteps: int) -> Tensor:
    """1e-4 to .02 at 1000 timesteps; shorter chains take larger steps."""
    scale = 1000 / timesteps
    return torch.linspace(scale * 1e-4, min(scale * 0.02, 0.999), timesteps, dtype=torch.float64)


def cosine_betas(timesteps: int) -> Tensor:
    """A_t = cos²((t/T + .008) / 1.008 · pi/2), no beta above .999. arXiv 2102.09672."""
    times = torch.arange(timesteps + 1, dtype=torch.float64) / timesteps
    level = torch.cos((times + 0.008) / 1.008 * math.pi / 2) ** 2
    return (1 - level[1:] / level[:-1]).clamp(max=0.999)


BETAS = {"linear": linear_betas, "cosine": cosine_betas}


class Normal(NamedTuple):
    """A diagonal normal distribution."""

    mean: Tensor
    log_variance: Tensor


class Schedule:
    """Noise levels by timestep: ``Schedule("linear", 1000).add_noise(x, noise, t)``."""

    def __init__(self, kind: ScheduleKind = "linear", timesteps: int = 1000) -> None:
        if kind not in BETAS:
            raise FieldError.unknown("schedule", kind, BETAS)
        self.kind, self.timesteps = kind, timesteps
        self.betas = BETAS[kind](timesteps)
        self.kept = torch.cumprod(1 - self.betas, 0)
        """A_t: the share of the signal's variance that is left."""
        before = torch.cat([self.kept.new_ones(1), self.kept[:-1]])
        self.posterior_variance = self.betas * (1 - before) / (1 - self.kept)
        # The first is 0: its logarithm is taken from the second, as in the official code.
        rest = self.posterior_variance[1:]
        self.posterior_log_variance = torch.cat([rest[:1], rest]).log() if timesteps > 1 else self.betas.log()
        self.posterior_of_clean = self.betas * before.sqrt() / (1 - self.kept)
        self.posterior_of_noisy = (1 - before) * (1 - self.betas).sqrt() / (1 - self.kept)

    def at(self, values: Tensor, t: Tensor, like: Tensor) -> Tensor:
        """Numbers of timesteps (batch,), shaped to be multiplied with images."""
        return values.to(t.device, non_blocking=True)[t].to(like.dtype).view(-1, *(1,) * (like.dim() - 1))

    def add_noise(self, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """x_t = sqrt(A_t) x_0 + sqrt(1 - A_t) noise."""
        return self.at(self.kept.sqrt(), t, clean) * clean + self.at((1 - self.kept).sqrt(), t, clean) * noise

    def velocity(self, clean: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """v = sqrt(A_t) noise - sqrt(1 - A_t) x_0. arXiv 2202.00512."""
        return self.at(self.kept.sqrt(), t, clean) * noise - self.at((1 - self.kept).sqrt(), t, clean) * clean

    def clean_of_noise(self, noisy: Tensor, noise: Tensor, t: Tensor) -> Tensor:
        """x_0 of x_t and its noise."""
        return (noisy - self.at((1 - self.kept).sqrt(), t, noisy) * noise) / self.at(self.kept.sqrt(), t, noisy)

    def clean_of_velocity(self, noisy: Tensor, velocity: Tensor, t: Tensor) -> Tensor:
        """x_0 of x_t and its velocity."""
        return self.at(self.kept.sqrt(), t, noisy) * noisy - self.at((1 - self.kept).sqrt(), t, noisy) * velocity

    def posterior(self, clean: Tensor, noisy: Tensor, t: Tensor) -> Normal:
        """q(x_t-1 | x_t, x_0)."""
        mean = self.at(self.posterior_of_clean, t, noisy) * clean + self.at(self.posterior_of_noisy, t, noisy) * noisy
        return Normal(mean, self.at(self.posterior_log_variance, t, noisy).expand_as(mean))

    def learnt_log_variance(self, share: Tensor, t: Tensor) -> Tensor:
        """From a prediction in [-1, 1]: between the posterior's (-1) and b_t (1), by their logarithms."""
        low, high = self.at(self.posterior_log_variance, t, share), self.at(self.betas.log(), t, share)
        share = (share + 1) / 2
        return share * high + (1 - share) * low
