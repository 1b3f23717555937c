"""`siamesenorm::swiglu`: ``silu(gate) * value`` of rows (value, gate), in one pass; backward keeps the rows alone."""

from __future__ import annotations

import math
from ctypes import Structure, c_int32, c_int64, c_void_p
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from siamesenorm.residual.kernels import native
from siamesenorm.residual.kernels.eager import plain_gradients, runs_eager, wants_plain_backward
from siamesenorm.residual.kernels.operator import define, operators


class SwiGLUArgs(Structure):
    """`SwiGLUCall` of sublayers.c."""

    _fields_ = (
        ("rows", c_int64),
        ("hidden", c_int64),
        ("threads", c_int32),
        *((name, c_void_p) for name in ("projected", "grad", "out")),
    )


def plain(projected: Tensor) -> Tensor:
    """The same in PyTorch's operators."""
    value, gate = projected.chunk(2, dim=-1)
    return F.silu(gate) * value


def swiglu(projected: Tensor) -> Tensor:
    """``silu(gate) * value`` of one projection, whose halves are (value, gate)."""
    if runs_eager(projected) and native.takes(projected):
        return operators.swiglu(projected)
    return plain(projected)


def _forward(projected: Tensor) -> Tensor:
    projected = projected.contiguous()
    *rows, both = projected.shape
    out = projected.new_empty((*rows, both // 2))
    _call("swiglu_forward", projected, None, out)
    return out


def _backward(grad: Tensor, projected: Tensor) -> Tensor:
    projected = projected.contiguous()
    out = torch.empty_like(projected)
    _call("swiglu_backward", projected, grad.contiguous(), out)
    return out


def _call(name: str, projected: Tensor, grad: Tensor | None, out: Tensor) -> None:
    *rows, both = projected.shape
    if both % 2:
        raise RuntimeError(f"swiglu: {both} features do not fall into two halves")
    units = (*rows, both // 2)
    arguments = SwiGLUArgs(
        math.prod(rows),
        both // 2,
        torch.get_num_threads(),
        native.pointer(projected, projected.shape),
        native.pointer(grad, units),
        native.pointer(out, units if grad is None else projected.shape),
    )
    native.call(name, arguments)


def _keep(ctx: Any, inputs: tuple[Tensor], output: Tensor) -> None:
    ctx.save_for_backward(*inputs)


def _differentiate(ctx: Any, grad: Tensor) -> Tensor | None:
    if wants_plain_backward():
        return plain_gradients(plain, ctx.saved_tensors, (grad,))[0]
    return operators.swiglu_backward(grad, *ctx.saved_tensors)


define(
    "swiglu_backward(Tensor grad, Tensor projected) -> Tensor",
    cpu=_backward,
    fake=lambda grad, projected: torch.empty_like(projected, memory_format=torch.contiguous_format),
)
define(
    "swiglu(Tensor projected) -> Tensor",
    cpu=_forward,
    fake=lambda projected: projected.new_empty((*projected.shape[:-1], projected.shape[-1] // 2)),
    keep=_keep,
    differentiate=_differentiate,
)
