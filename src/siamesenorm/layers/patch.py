"""Images to tokens: one token for every square patch."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from siamesenorm.residual.hooks import has_hooks


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
