"""Rotary positions (RoPE, arXiv 2104.09864): queries and keys turned by an angle that grows with their position.

The pairs that turn together are feature i and feature i + head_dim/2 ("rotate half"), as in OLMo, Llama and their
kin. Angles are made in float32 whatever the model's dtype: in bfloat16 position 1000 could not be told from 1003.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from siamesenorm.residual.norms import runs_plain_eager

Turn = tuple[Tensor, Tensor]  # cos and sin, each (tokens, head_dim/2) or (batch, tokens, head_dim/2), float32


def rotary_turn(positions: Tensor, head_dim: int, theta: float = 10000.0) -> Turn:
    """cos and sin of every position's angles, for positions (tokens,) or (batch, tokens)."""
    steps = torch.arange(0, head_dim, 2, dtype=torch.float32, device=positions.device)
    angles = positions.to(torch.float32).unsqueeze(-1) * (1.0 / theta ** (steps / head_dim))
    return angles.cos(), angles.sin()


def rotate(x: Tensor, turn: Turn) -> Tensor:
    """Turn heads ``x`` of shape (batch, tokens, heads, head_dim) by their positions."""
    if runs_plain_eager(x, *turn):
        return _Rotate.apply(x, *turn)
    return _rotate_plain(x, turn)


def split_and_rotate(qkv: Tensor, heads: int, kv_heads: int, turn: Turn) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of one fused projection (batch, tokens, all heads, head_dim), the first two turned."""
    if runs_plain_eager(qkv, *turn):
        return _SplitRotate.apply(qkv, heads, kv_heads, *turn)
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=2)
    return rotate(q, turn), rotate(k, turn), v


def _rotate_plain(x: Tensor, turn: Turn) -> Tensor:
    cos, sin = (part.unsqueeze(-2) for part in turn)
    first, second = x.float().chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1).to(x.dtype)


def _turn(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, direction: float) -> Tensor:
    """`x` turned into `out`; direction -1 turns back."""
    if x.dtype != cos.dtype:
        return out.copy_(_turn(x.to(cos.dtype), cos, sin, torch.empty_like(x, dtype=cos.dtype), direction))
    half = x.shape[-1] // 2
    cos, sin = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first, second = x[..., :half], x[..., half:]
    torch.mul(first, cos, out=out[..., :half]).addcmul_(second, sin, value=-direction)
    torch.mul(second, cos, out=out[..., half:]).addcmul_(first, sin, value=direction)
    return out


class _Rotate(torch.autograd.Function):
    """The backward of a turn is the turn back: nothing but the angles is kept."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _turn(x, cos, sin, torch.empty_like(x), 1.0)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        return _turn(grad, cos, sin, torch.empty_like(grad), -1.0), None, None


class _SplitRotate(torch.autograd.Function):
    """Turn and split; backward gathers the three gradients into one tensor, turning two on the way.

    Values are copied along with the turned queries and keys, so that the projection itself need not be kept.
    """

    @staticmethod
    def forward(ctx: Any, qkv: Tensor, heads: int, kv_heads: int, cos: Tensor, sin: Tensor) -> Any:
        ctx.save_for_backward(cos, sin)
        ctx.sizes, ctx.shape = [heads, kv_heads, kv_heads], qkv.shape
        out, turned = torch.empty_like(qkv), heads + kv_heads
        _turn(qkv[:, :, :turned], cos, sin, out[:, :, :turned], 1.0)
        out[:, :, turned:] = qkv[:, :, turned:]
        return out.split(ctx.sizes, dim=2)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_q: Tensor, grad_k: Tensor, grad_v: Tensor) -> tuple[Tensor | None, ...]:
        cos, sin = ctx.saved_tensors
        grad = grad_q.new_empty(ctx.shape)
        q, k, v = grad.split(ctx.sizes, dim=2)
        _turn(grad_q, cos, sin, q, -1.0)
        _turn(grad_k, cos, sin, k, -1.0)
        v.copy_(grad_v)
        return grad, None, None, None, None
