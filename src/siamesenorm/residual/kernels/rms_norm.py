"""`siamesenorm::rms_norm`: x / sqrt(mean(x^2) + eps) * weight + bias over the last dimension, in one pass.

PyTorch's own on CPU is a chain of five operators. Backward keeps the input and one number per row. On a GPU input and
parameters may be of float32, bfloat16 and float16 in any mixture.
"""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from siamesenorm.residual.kernels import devices, native
from siamesenorm.residual.kernels.eager import plain_gradients, runs_eager, wants_plain_backward
from siamesenorm.residual.kernels.operator import define, operators
from siamesenorm.residual.precision import widened


class NormArgs(Structure):
    """`Norm` of rows.c."""

    _fields_ = (
        ("present", c_int32),
        ("centred", c_int32),
        ("eps", c_float),
        *((name, c_void_p) for name in ("weight", "bias", "mean", "rstd", "grad_weight", "grad_bias")),
    )


class NormCallArgs(Structure):
    """`NormCall` of rows.c."""

    _fields_ = (
        ("rows", c_int64),
        ("dim", c_int64),
        ("threads", c_int32),
        ("norm", NormArgs),
        *((name, c_void_p) for name in ("x", "grad", "out")),
    )


def plain(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """RMSNorm in PyTorch's operators; low-precision input is normalised in float32 and returned in its own dtype."""
    values = widened(x)
    out = F.rms_norm(values, x.shape[-1:], None if weight is None else weight.to(values.dtype), eps)
    return (out if bias is None else out + bias).to(x.dtype)


def rms_norm(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    """RMSNorm, by the operator where it may run."""
    if runs_eager(x, weight, bias) and devices.takes(x, weight, bias):
        return operators.rms_norm(x, weight, bias, eps)[0]
    return plain(x, weight, bias, eps)


def _forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    x, weight, bias = x.contiguous(), native.whole(weight), native.whole(bias)
    out, rstd = torch.empty_like(x), x.new_empty(x.shape[:-1])
    width = x.shape[-1:]
    norm = NormArgs(
        1, 0, eps, native.pointer(weight, width), native.pointer(bias, width), None, native.pointer(rstd, rstd.shape)
    )
    arguments = NormCallArgs(*native.size_of(x), norm, native.pointer(x, x.shape), None, native.pointer(out, x.shape))
    native.call("norm_forward", arguments)
    return out, rstd


def _backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of input, weight and bias; what is absent comes back empty."""
    grad, x, rstd = grad.contiguous(), x.contiguous(), rstd.contiguous()
    weight, bias = native.whole(weight), native.whole(bias)
    out, width = torch.empty_like(x), x.shape[-1:]
    grad_weight = x.new_empty((0,) if weight is None else width)
    grad_bias = x.new_empty((0,) if bias is None else width)
    norm = NormArgs(
        1,
        0,
        0.0,
        native.pointer(weight, width),
        native.pointer(bias, width),
        None,
        native.pointer(rstd, x.shape[:-1]),
        None if weight is None else native.pointer(grad_weight, width),
        None if bias is None else native.pointer(grad_bias, width),
    )
    arguments = NormCallArgs(
        *native.size_of(x),
        norm,
        native.pointer(x, x.shape),
        native.pointer(grad, x.shape),
        native.pointer(out, x.shape),
    )
    native.call("norm_backward", arguments)
    return out, grad_weight, grad_bias


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, weight, bias, ctx.eps = inputs
    ctx.save_for_backward(x, weight, bias, output[1])
    ctx.mark_non_differentiable(output[1])


def _differentiate(ctx: Any, grad: Tensor, _: Any) -> tuple[Tensor | None, ...]:
    x, weight, bias, rstd = ctx.saved_tensors
    if wants_plain_backward():
        return *plain_gradients(partial(plain, eps=ctx.eps), (x, weight, bias), (grad,)), None
    out, grad_weight, grad_bias = operators.rms_norm_backward(grad, x, weight, bias, rstd)
    return out, None if weight is None else grad_weight, None if bias is None else grad_bias, None


def _forward_shapes(x: Tensor, weight: Any, bias: Any, eps: float) -> tuple[Tensor, Tensor]:
    return torch.empty_like(x, memory_format=torch.contiguous_format), x.new_empty(x.shape[:-1], dtype=torch.float32)


def _backward_shapes(grad: Any, x: Tensor, weight: Any, bias: Any, rstd: Any) -> tuple[Tensor, Tensor, Tensor]:
    made = torch.empty_like(x, memory_format=torch.contiguous_format)
    return made, like_parameter(weight, x), like_parameter(bias, x)


def like_parameter(parameter: Tensor | None, x: Tensor) -> Tensor:
    """Room for a parameter's gradient; empty where there is no such parameter."""
    if parameter is None:
        return x.new_empty(0, dtype=torch.float32)
    return torch.empty_like(parameter, memory_format=torch.contiguous_format)


define(
    "rms_norm_backward(Tensor grad, Tensor x, Tensor? weight, Tensor? bias, Tensor rstd) -> (Tensor, Tensor, Tensor)",
    cpu=_backward,
    cuda=devices.in_triton("triton_norm", "backward"),
    fake=_backward_shapes,
)
define(
    "rms_norm(Tensor x, Tensor? weight, Tensor? bias, float eps) -> (Tensor, Tensor)",
    cpu=_forward,
    cuda=devices.in_triton("triton_norm", "forward"),
    fake=_forward_shapes,
    keep=_keep,
    differentiate=_differentiate,
)
