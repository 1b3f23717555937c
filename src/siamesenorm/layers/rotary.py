"""Rotary positions (RoPE, arXiv 2104.09864): queries and keys turned by an angle that grows with their position.

The pairs that turn together are feature i and feature i + head_dim/2 ("rotate half"), as in OLMo, Llama and their
kin. Angles are made in float32 whatever the model's dtype: in bfloat16 position 1000 could not be told from 1003.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from siamesenorm.layers import native
from siamesenorm.residual.norms import LOW_PRECISION, runs_plain_eager

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
    cos, sin = turn
    if runs_plain_eager(x, *turn):
        return _Rotate.apply(x, cos, sin) if torch.is_grad_enabled() else _turn(x, cos, sin, torch.empty_like(x), 1.0)
    wide = x.float() if x.dtype in LOW_PRECISION else x
    # Each half beside its partner: (first, second) * (cos, cos) + (second, first) * (-sin, sin).
    return torch.addcmul(wide * cos, wide.roll(x.shape[-1] // 2, dims=-1), sin).to(x.dtype)


def split_and_rotate(qkv: Tensor, heads: int, kv_heads: int, turn: Turn) -> tuple[Tensor, Tensor, Tensor]:
    """Queries, keys and values of one fused projection (batch, tokens, all heads, head_dim), the first two turned."""
    if torch.is_grad_enabled() and runs_plain_eager(qkv, *turn):
        return _SplitRotate.apply(qkv, heads, kv_heads, *turn)
    turned = rotate(qkv[:, :, : heads + kv_heads], turn)
    return turned[:, :, :heads], turned[:, :, heads:], qkv[:, :, heads + kv_heads :]


def _turn(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, direction: float) -> Tensor:
    """`x` turned into `out`; direction -1 turns back."""
    if x.dtype in LOW_PRECISION:
        return out.copy_(_turn(x.float(), cos, sin, torch.empty_like(x, dtype=torch.float32), direction))
    if native.turn_usable(x, cos, sin, out):
        return native.turn(x, cos, sin, out, direction)
    half = x.shape[-1] // 2
    torch.mul(x, cos, out=out)
    out[..., :half].addcmul_(x[..., half:], sin[..., :half], value=direction)
    out[..., half:].addcmul_(x[..., :half], sin[..., half:], value=direction)
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
