"""What a diffusion model is conditioned on: how noisy its input is, and of which class the picture is to be."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

FREQUENCIES = 256
"""Width of the sinusoidal features of a timestep."""


class TimestepEmbedding(nn.Module):
    """Timesteps, whole or fractional, from 0 to 1000: sinusoidal features, then an MLP."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up = nn.Linear(FREQUENCIES, dim)
        self.down = nn.Linear(dim, dim)

    def width_sums(self) -> set[str]:
        """The second matrix; the first sums over frequencies."""
        return {"down.weight"}

    def forward(self, t: Tensor) -> Tensor:
        """(batch,) to (batch, dim)."""
        return self.down(F.silu(self.up(timestep_features(t).to(self.up.weight.dtype))))


def timestep_features(t: Tensor, width: int = FREQUENCIES, longest: float = 10000.0) -> Tensor:
    """(batch,) to (batch, width): cosines, then sines, of angles whose frequencies fall from 1 to 1/longest."""
    half = width // 2
    frequencies = torch.exp(-math.log(longest) * torch.arange(half, dtype=torch.float32, device=t.device) / half)
    angles = t.float()[:, None] * frequencies
    return torch.cat([angles.cos(), angles.sin()], dim=-1)


class LabelEmbedding(nn.Module):
    """Classes, and one more row for "no class", which labels become at a rate in training (arXiv 2207.12598)."""

    def __init__(self, classes: int, dim: int, dropout: float) -> None:
        super().__init__()
        self.classes, self.dropout = classes, dropout
        self.table = nn.Embedding(classes + (dropout > 0), dim)

    def forward(self, y: Tensor) -> Tensor:
        """(batch,) to (batch, dim); label `classes` is the unconditional one."""
        if self.training and self.dropout:
            y = torch.where(torch.rand(y.shape, device=y.device) < self.dropout, self.classes, y)
        return self.table(y)
