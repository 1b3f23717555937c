"""Fixed positions of an image's patches: sines and cosines of their column and of their row."""

from __future__ import annotations

import torch
from torch import Tensor


def grid_positions(side: int, dim: int, device: torch.device | str | None = None) -> Tensor:
    """(side · side, dim) for patches row by row: half of the width for the column, half for the row, float32."""
    coordinates = torch.arange(side, dtype=torch.float64, device=device)
    features = line_positions(coordinates, dim // 2)
    columns, rows = features.repeat(side, 1), features.repeat_interleave(side, 0)
    return torch.cat([columns, rows], dim=1).float()


def line_positions(coordinates: Tensor, dim: int) -> Tensor:
    """(n,) to (n, dim): sines, then cosines, of angles whose frequencies fall from 1 to 1/10000."""
    half = dim // 2
    frequencies = 10000.0 ** -(torch.arange(half, dtype=coordinates.dtype, device=coordinates.device) / half)
    angles = coordinates[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)
