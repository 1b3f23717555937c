"""Rotary positions (RoPE, arXiv 2104.09864): queries and keys turned by an angle that grows with their position.

The pairs that turn together are feature i and feature i + head_dim/2 ("rotate half"), as in OLMo, Llama and their
kin. Angles are made in float32 whatever the model's dtype: in bfloat16 position 1000 could not be told from 1003.
"""

from __future__ import annotations

import torch
from torch import Tensor

from siamesenorm.layers.kernels.rotary import rotary

Turn = tuple[Tensor, Tensor]
"""(cos, cos) and (-sin, sin) of every position, each (tokens, 1, head_dim) or (batch, tokens, 1, head_dim), float32;
the axis of 1 stands for the heads."""


def rotary_turn(positions: Tensor, head_dim: int, theta: float = 10000.0) -> Turn:
    """The turn of every position, for positions (tokens,) or (batch, tokens)."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    angles = positions.to(torch.float32)[..., None, None] * (1.0 / theta ** (steps / head_dim))
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], dim=-1), torch.cat([-sin, sin], dim=-1)


def rotate(x: Tensor, turn: Turn) -> Tensor:
    """Turn heads ``x`` of shape (batch, tokens, heads, head_dim) by their positions."""
    return rotary(x, x.shape[2], *turn)


def split_and_rotate(qkv: Tensor, heads: int, kv_heads: int, turn: Turn) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of one fused projection (batch, tokens, all heads, head_dim), the first two turned."""
    if torch.compiler.is_compiling():  # a copy of the values would be for nothing
        q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=2)
        return rotate(q, turn), rotate(k, turn), v
    q, k, v = rotary(qkv, heads + kv_heads, *turn).split([heads, kv_heads, kv_heads], dim=2)
    return q, k, v
