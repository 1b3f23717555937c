"""Images to tokens: one token for every square patch, and the positions of patches, fixed or learned."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from siamesenorm.residual.hooks import has_hooks

PatchGrid = tuple[int, int]


class PatchEmbedding(nn.Module):
    """(batch, channels, height, width) to (batch, patches, dim), row by row; the weight is that of a convolution."""

    def __init__(self, patch_size: int, channels: int, dim: int, bias: bool = True) -> None:
        super().__init__()
        self.patch_size = patch_size
        self.proj = nn.Conv2d(channels, dim, patch_size, stride=patch_size, bias=bias)

    def forward(self, image: Tensor) -> Tensor:
        """As a convolution whose stride is its width, which is one product of all patches with the weight."""
        if type(self.proj) is not nn.Conv2d or has_hooks(self.proj):
            return self.proj(image).flatten(2).transpose(1, 2)
        weight = self.proj.weight
        return F.linear(cut_patches(image, self.patch_size), weight.flatten(1), self.proj.bias)


def cut_patches(image: Tensor, size: int) -> Tensor:
    """(batch, patches, channels · size · size): the pixels of every patch, ordered as a convolution's weight."""
    batch, channels, height, width = image.shape
    rows, columns = height // size, width // size
    cut = image.reshape(batch, channels, rows, size, columns, size).permute(0, 2, 4, 1, 3, 5)
    return cut.reshape(batch, rows * columns, channels * size * size)


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


def resample_positions(positions: Tensor, old: PatchGrid, new: PatchGrid, prefix: int) -> Tensor:
    """(1, prefix + rows · columns, dim) for the grid `new`: bicubic, antialiased, the prefix tokens' own unchanged."""
    if old == new:
        return positions
    tokens, grid = positions[:, :prefix], positions[:, prefix:]
    image = grid.float().unflatten(1, old).permute(0, 3, 1, 2)
    image = F.interpolate(image, size=new, mode="bicubic", antialias=True)
    grid = image.flatten(2).transpose(1, 2).to(positions.dtype)
    return torch.cat([tokens, grid], dim=1)


def square_grid(tokens: int, prefix: int) -> PatchGrid:
    """The grid of so many position vectors, the prefix included, where nobody says it."""
    side = math.isqrt(tokens - prefix)
    if side * side != tokens - prefix:
        raise ValueError(f"pos_embed: {tokens} positions of which {prefix} are no patches are not a square of patches")
    return side, side
