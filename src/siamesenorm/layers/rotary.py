"""Rotary positions (RoPE, arXiv 2104.09864): queries and keys rotated by an angle that grows with their position.

The pairs that rotate together are feature i and feature i + head_dim/2 ("rotate half"), as in OLMo, Llama and their
kin. Where only some features rotate, they are the first of each half. Angles are made in float32 whatever the model's
dtype: in bfloat16 position 1000 could not be distinguished from 1003.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from siamesenorm.layers.kernels.rotary import rotary
from siamesenorm.layers.rope_scaling import Scaling

CosSin = tuple[Tensor, Tensor]
"""(cos, cos) and (-sin, sin) of every position, each (tokens, 1, head_dim) or (batch, tokens, 1, head_dim), float32;
the axis of 1 stands for the heads."""


@dataclass(frozen=True)
class Rotary:
    """How fast every pair of features rotates."""

    theta: float = 10000.0
    rotary_dim: int | None = None
    """How many features of a head rotate; None: all."""
    scaling: Scaling | None = None

    def cos_sin(self, positions: Tensor, head_dim: int) -> CosSin:
        """cos and sin of every position, for positions (tokens,) or (batch, tokens)."""
        width = head_dim if self.rotary_dim is None else self.rotary_dim
        steps = torch.arange(0, width, 2, dtype=torch.float32, device=positions.device)
        frequencies = 1.0 / self.theta ** (steps / max(width, 1))
        if self.scaling is not None:
            frequencies = self.scaling.frequencies(frequencies, self.theta)
        if width < head_dim:
            frequencies = torch.cat([frequencies, frequencies.new_zeros((head_dim - width) // 2)])
        angles = positions.to(torch.float32)[..., None, None] * frequencies
        cos, sin = angles.cos(), angles.sin()
        if self.scaling is not None and self.scaling.attention_factor != 1:
            # What does not rotate stays as it is.
            size = torch.where(frequencies > 0, self.scaling.attention_factor, 1.0)
            cos, sin = cos * size, sin * size
        return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rotate(x: Tensor, cos_sin: CosSin) -> Tensor:
    """Rotate heads ``x`` of shape (batch, tokens, heads, head_dim) by their positions."""
    return rotary(x, x.shape[2], *cos_sin)


def split_and_rotate(qkv: Tensor, heads: int, kv_heads: int, cos_sin: CosSin) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of one fused projection (batch, tokens, all heads, head_dim), the first two rotated."""
    if torch.compiler.is_compiling():  # a copy of the values would be for nothing
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=2)
        return rotate(q, cos_sin), rotate(k, cos_sin), v
    q, k, v = rotary(qkv, heads + kv_heads, *cos_sin).split([heads, kv_heads, kv_heads], dim=2)
    return q, k, v
