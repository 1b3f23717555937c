"""`siamesenorm::rotary`: the first heads of a projection rotated by their positions, the others copied, in one pass.

The derivative of a rotation is the rotation back, by the same operator: nothing but the angles is kept.
"""

from __future__ import annotations

import math
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from siamesenorm.residual.kernels import native
from siamesenorm.residual.kernels.eager import runs_eager, transformed
from siamesenorm.residual.kernels.operator import define, operators
from siamesenorm.residual.precision import LOW_PRECISION


class HeadsArgs(Structure):
    """`Heads` of sublayers.c."""

    _fields_ = (("data", c_void_p), *((name, c_int64) for name in ("batch", "token", "head")))


class RotaryArgs(Structure):
    """`RotaryCall` of sublayers.c."""

    _fields_ = (
        *((name, c_int64) for name in ("batch", "tokens", "heads", "width", "positions")),
        ("threads", c_int32),
        ("direction", c_float),
        ("cosine", c_void_p),
        ("sine", c_void_p),
        ("x", HeadsArgs),
        ("out", HeadsArgs),
    )


def plain(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """All heads rotated, in PyTorch's operators, in float32 at least."""
    wide = x.float() if x.dtype in LOW_PRECISION else x
    half = x.shape[-1] // 2
    first, second = wide[..., :half], wide[..., half:]
    c, s = cos[..., :half], sin[..., half:]
    return torch.cat([first * c - second * s, second * c + first * s], dim=-1).to(x.dtype)


def rotary(x: Tensor, rotated: int, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads (batch, tokens, heads, head_dim), the first `rotated` of them rotated by their positions.

    cos, sin: (cos, cos) and (-sin, sin), each (tokens, 1, head_dim) or (batch, tokens, 1, head_dim).
    """
    learned = torch.is_grad_enabled() and (cos.requires_grad or sin.requires_grad)
    if runs_eager(x, cos, sin) and not learned and _fits(x, cos, sin) and native.takes(x, cos, sin):
        return operators.rotary(x, rotated, cos, sin, 1.0)
    return _plain_of_first(x, rotated, cos, sin)


def _plain_of_first(x: Tensor, rotated: int, cos: Tensor, sin: Tensor) -> Tensor:
    if rotated == x.shape[2]:
        return plain(x, cos, sin)
    return torch.cat([plain(x[:, :, :rotated], cos, sin), x[:, :, rotated:]], dim=2)


def _fits(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    """Whether these are heads, and angles of their tokens."""
    *positions, one, width = cos.shape
    return (
        x.dim() == 4
        and (one, width) == (1, x.shape[3])
        and positions in ([x.shape[1]], [1, x.shape[1]], list(x.shape[:2]))
        and cos.shape == sin.shape
    )


def _rotate(x: Tensor, rotated: int, cos: Tensor, sin: Tensor, direction: float) -> Tensor:
    if not _fits(x, cos, sin):
        raise RuntimeError(
            f"rotary: angles of shapes {tuple(cos.shape)} and {tuple(sin.shape)} do not fit heads of shape "
            f"{tuple(x.shape)}"
        )
    batch, tokens, heads, width = x.shape
    if width % 2 or not 0 <= rotated <= heads:
        raise RuntimeError(f"rotary: {rotated} of {heads} heads of width {width} cannot be rotated")
    x = x if x.stride(3) == 1 else x.contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    cos, sin = cos.contiguous(), sin.contiguous()
    positions = math.prod(cos.shape[:-2])
    parts = [HeadsArgs(native.strided(t, x.shape), *(t.stride(d) for d in range(3))) for t in (x, out)]
    angles = native.pointer(cos, cos.shape), native.pointer(sin, cos.shape)
    if rotated:
        threads = torch.get_num_threads()
        native.call("turn", RotaryArgs(batch, tokens, rotated, width, positions, threads, direction, *angles, *parts))
    if rotated < heads:
        out[:, :, rotated:] = x[:, :, rotated:]
    return out


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    _, ctx.rotated, cos, sin, ctx.direction = inputs
    if any(ctx.needs_input_grad[2:4]):
        raise NotImplementedError("siamesenorm::rotary has no derivative for its angles; its plain form has one")
    ctx.save_for_backward(cos, sin)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    cos, sin = ctx.saved_tensors
    if transformed():
        back = _plain_of_first(grad, ctx.rotated, cos, -ctx.direction * sin)
    else:
        back = operators.rotary(grad, ctx.rotated, cos, sin, -ctx.direction)
    return back, None, None, None, None


define(
    "rotary(Tensor x, int rotated, Tensor cos, Tensor sin, float direction) -> Tensor",
    cpu=_rotate,
    fake=lambda x, rotated, cos, sin, direction: torch.empty_like(x, memory_format=torch.contiguous_format),
    keep=_keep,
    differentiate=_differentiate,
)
