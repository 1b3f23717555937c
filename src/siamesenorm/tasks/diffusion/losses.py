"""What a denoiser is trained on: the mean squared error of its prediction and, where it learns variances, the bound.

The hybrid loss (arXiv 2102.09672) as DiT has it: mse + vlb, where vlb is the one term of the variational bound that
belongs to the timestep drawn, in bits a dimension, and teaches the variances alone: the mean in it is detached.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from siamesenorm.tasks.diffusion.schedule import Normal, Schedule

Denoise = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(noisy images, timesteps, labels) to a prediction, with or without variances behind it."""
FLOW_TIMESTEPS = 1000
"""A flow's time, 0 to 1, is given to the model times this."""


class Losses(NamedTuple):
    """One number a sample."""

    mse: Tensor
    vlb: Tensor | None = None

    @property
    def total(self) -> Tensor:
        """What is differentiated."""
        return self.mse if self.vlb is None else self.mse + self.vlb


def gaussian_losses(
    denoise: Denoise,
    clean: Tensor,
    labels: Tensor,
    noise: Tensor,
    t: Tensor,
    schedule: Schedule,
    *,
    velocity: bool = False,
    learn_sigma: bool = True,
) -> Losses:
    """Of predicting the noise, or the velocity, at whole timesteps t."""
    noisy = schedule.add_noise(clean, noise, t)
    target = schedule.velocity(clean, noise, t) if velocity else noise
    predicted = denoise(noisy, t, labels).float()
    if not learn_sigma:
        return Losses(mean_of_sample((predicted - target) ** 2))
    predicted, share = predicted.chunk(2, dim=1)
    mse = mean_of_sample((predicted - target) ** 2)
    back = schedule.clean_of_velocity if velocity else schedule.clean_of_noise
    mean = schedule.posterior(back(noisy, predicted.detach(), t), noisy, t).mean
    model = Normal(mean, schedule.learnt_log_variance(share, t))
    return Losses(mse, bound_term(schedule, clean, noisy, t, model))


def flow_losses(denoise: Denoise, clean: Tensor, labels: Tensor, noise: Tensor, time: Tensor) -> Losses:
    """Of predicting noise - clean on the straight line between them (arXiv 2210.02747); time 1 is noise."""
    share = time.to(clean.dtype).view(-1, 1, 1, 1)
    noisy = (1 - share) * clean + share * noise
    predicted = denoise(noisy, time * FLOW_TIMESTEPS, labels).float()
    return Losses(mean_of_sample((predicted - (noise - clean)) ** 2))


def bound_term(schedule: Schedule, clean: Tensor, noisy: Tensor, t: Tensor, model: Normal) -> Tensor:
    """(batch,) bits a dimension: KL from the posterior for t > 0, -log p(x_0 | x_1) of bytes for t = 0."""
    divergence = normal_kl(schedule.posterior(clean, noisy, t), model)
    decoding = -byte_log_likelihood(clean, Normal(model.mean, model.log_variance))
    nats = torch.where((t == 0).view(-1, *(1,) * (clean.dim() - 1)), decoding, divergence)
    return mean_of_sample(nats) / math.log(2)


def normal_kl(one: Normal, other: Normal) -> Tensor:
    """KL(one || other) of every dimension, in nats."""
    gap = one.log_variance - other.log_variance
    return 0.5 * (gap.exp() - 1 - gap + (one.mean - other.mean) ** 2 * (-other.log_variance).exp())


def byte_log_likelihood(clean: Tensor, model: Normal) -> Tensor:
    """log p of bytes scaled to [-1, 1]: the normal's mass within half a step, the outermost bytes having the tails."""
    half, deviation = 1 / 255, (0.5 * model.log_variance).exp()
    upper = (clean + half - model.mean) / deviation
    lower = (clean - half - model.mean) / deviation
    mass = normal_mass(lower, upper)
    log_mass = mass.clamp(min=1e-12).log()
    log_below = torch.special.log_ndtr(upper).clamp(min=math.log(1e-12))
    log_above = torch.special.log_ndtr(-lower).clamp(min=math.log(1e-12))
    return torch.where(clean < -0.999, log_below, torch.where(clean > 0.999, log_above, log_mass))


def normal_mass(lower: Tensor, upper: Tensor) -> Tensor:
    """P(lower < z < upper), from the tail in which it loses no digits."""
    flip = lower > 0
    low, high = torch.where(flip, -upper, lower), torch.where(flip, -lower, upper)
    return torch.special.ndtr(high) - torch.special.ndtr(low)


def mean_of_sample(values: Tensor) -> Tensor:
    """(batch,) mean over all else."""
    return values.flatten(1).mean(1)
