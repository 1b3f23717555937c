"""Learned positions of patches, carried over to another number of patches."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor

Grid = tuple[int, int]


def resample_positions(positions: Tensor, old: Grid, new: Grid, prefix: int) -> Tensor:
    """(1, prefix + rows · columns, dim) for the grid `new`: bicubic, antialiased, the prefix tokens' own unchanged."""
    if old == new:
        return positions
    tokens, grid = positions[:, :prefix], positions[:, prefix:]
    image = grid.float().unflatten(1, old).permute(0, 3, 1, 2)
    image = F.interpolate(image, size=new, mode="bicubic", antialias=True)
    grid = image.flatten(2).transpose(1, 2).to(positions.dtype)
    return torch.cat([tokens, grid], dim=1)


def square_grid(tokens: int, prefix: int) -> Grid:
    """The grid of so many position vectors, the prefix included, where nobody says it."""
    side = math.isqrt(tokens - prefix)
    if side * side != tokens - prefix:
        raise ValueError(f"pos_embed: {tokens} positions of which {prefix} are no patches are not a square of patches")
    return side, side
