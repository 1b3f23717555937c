"""`siamesenorm::siamese_step`, the fused step of a siamese pair: ``(X, Y, O) → (X', Y', h)``.

    X1 = X + c O          Y' = Y + O
    X' = N_X(X1)          s  = g * X' + N_Y(Y')          h = N_in(s)

N_X, g and N_in may each be absent, and O where streams are only read: then X1 = X and Y' = Y. Backward keeps X1, Y'
and a few numbers per row; X', N_Y(Y') and s are made again there, because they cost a pass over memory each and
nothing else needs them.
"""

from __future__ import annotations

from collections.abc import Sequence
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from siamesenorm.residual.kernels import devices, native
from siamesenorm.residual.kernels.eager import plain_gradients, wants_plain_backward
from siamesenorm.residual.kernels.layer_norm import layer_norm
from siamesenorm.residual.kernels.operator import define, operators
from siamesenorm.residual.kernels.rms_norm import NormArgs, like_parameter
from siamesenorm.residual.kernels.rms_norm import plain as plain_rms_norm

ABSENT, RMS, LAYER = 0, 1, 2
"""What N_X, N_Y and N_in are, in the operator's argument `kinds`."""

Parameters = tuple[Tensor | None, ...]
"""Weight and bias of N_X, N_Y and N_in, then g."""
_NO_GRADS = (None,) * 7


class StepCallArgs(Structure):
    """`StepCall` of rows.c."""

    _fields_ = (
        ("rows", c_int64),
        ("dim", c_int64),
        ("threads", c_int32),
        ("scale", c_float),
        *((name, NormArgs) for name in ("norm_x", "norm_y", "norm_in")),
        *((name, c_void_p) for name in ("gain", "grad_gain", "x", "y", "output", "x1", "y1", "next_x", "h")),
        *((name, c_void_p) for name in ("grad_x", "grad_y", "grad_h", "out_x", "out_y", "out_output")),
    )


def plain(
    x: Tensor,
    y: Tensor,
    output: Tensor | None,
    scale: float,
    parameters: Sequence[Tensor | None],
    kinds: Sequence[int],
    eps: Sequence[float],
) -> tuple[Tensor, Tensor, Tensor]:
    """The module's equations in PyTorch's operators."""
    if output is not None:
        x, y = x + scale * output, y + output
    next_x, h = _read(x, y, parameters, kinds, eps)
    return next_x, y, h


def _read(
    x1: Tensor, y: Tensor, parameters: Sequence[Tensor | None], kinds: Sequence[int], eps: Sequence[float]
) -> tuple[Tensor, Tensor]:
    """X' and h from X1 and Y'."""
    weight_x, bias_x, weight_y, bias_y, weight_in, bias_in, gain = parameters
    x = _normed(x1, kinds[0], weight_x, bias_x, eps[0])
    s = (x if gain is None else gain * x) + _normed(y, kinds[1], weight_y, bias_y, eps[1])
    return x, _normed(s, kinds[2], weight_in, bias_in, eps[2])


def _normed(x: Tensor, kind: int, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
    if kind == ABSENT:
        return x
    return plain_rms_norm(x, weight, bias, eps) if kind == RMS else layer_norm(x, x.shape[-1:], weight, bias, eps)


def takes(
    x: Tensor, y: Tensor, output: Tensor | None, parameters: Sequence[Tensor | None], gate: Tensor | None = None
) -> bool:
    """Whether the operator can run: on streams of one shape and dtype, which O, its gate and g leave as it is.

    Under autocast on a GPU, O comes in a lower precision than the streams.
    """
    if x.shape != y.shape or x.dtype is not y.dtype or (output is not None and output.shape != x.shape):
        return False
    if gate is not None and output is not None and torch.broadcast_shapes(gate.shape, output.shape) != output.shape:
        return False
    for t in (output, gate, parameters[-1]):
        if t is not None and torch.promote_types(x.dtype, t.dtype) is not x.dtype:
            return False
    return devices.takes(x, y, output, *parameters)


def siamese_step(
    x: Tensor,
    y: Tensor,
    output: Tensor | None,
    scale: float,
    parameters: Parameters,
    kinds: list[int],
    eps: list[float],
) -> tuple[Tensor, Tensor, Tensor]:
    """(X', Y', h) by the operator; the caller has seen to it that it may run."""
    next_x, y1, h, *_ = operators.siamese_step(x, y, output, scale, *parameters, kinds, eps)
    if output is None:  # the operator returns nothing that it was given
        return next_x if kinds[0] else x, y, h
    return next_x, y1, h


def made(like: Tensor, writes: bool, kinds: Sequence[int]) -> list[Tensor]:
    """Room for X', Y', h and X1; what would be one of the others or an input is empty."""
    there = writes or kinds[0] != ABSENT, writes, True, writes and kinds[0] != ABSENT
    return [
        torch.empty_like(like, memory_format=torch.contiguous_format) if is_there else like.new_empty(0)
        for is_there in there
    ]


def _forward(x: Tensor, y: Tensor, output: Tensor | None, scale: float, *rest: Any) -> tuple[Tensor, ...]:
    *parameters, kinds, eps = rest
    # Copies have names here: C reads them after `_arguments` has returned.
    x, y, output, parameters = x.contiguous(), y.contiguous(), native.whole(output), [*map(native.whole, parameters)]
    next_x, y1, h, x1 = made(x, output is not None, kinds)
    stats = x.new_zeros(6, *x.shape[:-1])  # not all are written: an absent norm has none, RMSNorm no mean
    written = (None, None) if output is None else (x1 if kinds[0] else next_x, y1)
    tensors = (x, y, output, *written, next_x if kinds[0] else None, h)
    arguments = _arguments(x, stats, scale, parameters, kinds, eps, _NO_GRADS, tensors)
    native.call("step_forward", arguments)
    return next_x, y1, h, x1, stats


def _backward(grad_x: Tensor | None, grad_y: Tensor | None, grad_h: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Gradients of X, Y, O and the parameters; what is absent comes back empty, O's where Y' was no output."""
    x1, y1, stats, scale, *parameters, kinds = rest
    x1, y1, stats, grad_h = (t.contiguous() for t in (x1, y1, stats, grad_h))
    grad_x, grad_y, parameters = native.whole(grad_x), native.whole(grad_y), [*map(native.whole, parameters)]
    grads = [x1.new_empty((0,) if p is None else p.shape) for p in parameters]
    out_x, out_y = torch.empty_like(x1), torch.empty_like(x1)
    out_output = x1.new_empty(0) if grad_y is None else torch.empty_like(x1)
    tensors = (None, None, None, x1, y1, None, None, grad_x, grad_y, grad_h, out_x, out_y)
    arguments = _arguments(
        x1,
        stats,
        scale,
        parameters,
        kinds,
        (0.0, 0.0, 0.0),
        [None if p is None else g for p, g in zip(parameters, grads, strict=True)],
        (*tensors, None if grad_y is None else out_output),
    )
    native.call("step_backward", arguments)
    return out_x, out_y, out_output, *grads


def _arguments(
    like: Tensor,
    stats: Tensor,
    scale: float,
    parameters: Sequence[Tensor | None],
    kinds: Sequence[int],
    eps: Sequence[float],
    grads: Sequence[Tensor | None],
    tensors: Sequence[Tensor | None],
) -> StepCallArgs:
    """`tensors`: what is as large as the streams, in the order of the structure."""
    shape = like.shape
    width = shape[-1:]
    if len(kinds) != 3 or len(eps) != 3 or not {*kinds} <= {ABSENT, RMS, LAYER} or kinds[1] == ABSENT:
        raise RuntimeError(f"siamese_step: norms of the kinds {list(kinds)} with eps {list(eps)} are not allowed")
    a, b = [native.pointer(p, width) for p in parameters], [native.pointer(p, width) for p in grads]
    s = native.parts(stats, (6, *shape[:-1]))
    norms = [
        NormArgs(kinds[k] != ABSENT, kinds[k] == LAYER, eps[k], a[i], a[i + 1], s[i], s[i + 1], b[i], b[i + 1])
        for k, i in ((0, 0), (1, 2), (2, 4))
    ]
    addresses = [native.pointer(t, shape) for t in tensors]
    return StepCallArgs(*native.size_of(like), scale, *norms, a[6], b[6], *addresses)


def _keep(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    x, y, written, ctx.scale, *parameters, ctx.kinds, ctx.eps = inputs
    next_x, y1, _, x1, stats = output
    ctx.writes = written is not None
    ctx.mark_non_differentiable(stats)
    ctx.set_materialize_grads(False)
    if ctx.writes:
        x, y = x1 if ctx.kinds[0] else next_x, y1
    ctx.save_for_backward(x, y, stats, *parameters)


def _differentiate(
    ctx: Any, grad_x: Tensor | None, grad_y: Tensor | None, grad_h: Tensor | None, grad_x1: Tensor | None, _: Any
) -> tuple[Any, ...]:
    """X1 is an output too: where backward is differentiated again, what it did with X1 comes back as `grad_x1`."""
    x1, y1, stats, *parameters = ctx.saved_tensors
    of_x, of_y = ctx.writes or ctx.kinds[0], ctx.writes  # whether X' and Y' are outputs, and not empty
    grad_x = grad_x if of_x else None
    grad_y = None if not of_y else torch.zeros_like(y1) if grad_y is None else grad_y
    grad_h = torch.zeros_like(y1) if grad_h is None else grad_h
    grad_x1 = grad_x1 if ctx.writes and ctx.kinds[0] else None
    if wants_plain_backward():
        to_x1, to_y1, *to_parameters = plain_gradients(
            lambda x1, y1, *p: _read(x1, y1, p, ctx.kinds, ctx.eps),
            (x1, y1, *parameters),
            (torch.zeros_like(y1) if grad_x is None else grad_x, grad_h),
        )
        to_x = _sum(to_x1, grad_x1)
        to_y = _sum(to_y1, grad_y)
        to_output = _sum(to_y, None if to_x is None else ctx.scale * to_x) if ctx.writes else None
        return to_x, to_y, to_output, None, *to_parameters, None, None
    to_x, to_y, to_output, *grads = operators.siamese_step_backward(
        grad_x, grad_y, grad_h, x1, y1, stats, ctx.scale, *parameters, ctx.kinds
    )
    if grad_x1 is not None:
        to_x, to_output = to_x + grad_x1, to_output + ctx.scale * grad_x1
    to_parameters = [None if p is None else g for p, g in zip(parameters, grads, strict=True)]
    return to_x, to_y, to_output if ctx.writes else None, None, *to_parameters, None, None


def _sum(a: Tensor | None, b: Tensor | None) -> Tensor | None:
    return a if b is None else b if a is None else a + b


def _forward_shapes(x: Tensor, y: Any, output: Tensor | None, scale: float, *rest: Any) -> tuple[Tensor, ...]:
    return *made(x, output is not None, rest[-2]), x.new_empty(6, *x.shape[:-1], dtype=torch.float32)


def _backward_shapes(grad_x: Any, grad_y: Tensor | None, grad_h: Any, x1: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    to_output = x1.new_empty(0) if grad_y is None else torch.empty_like(x1)
    return torch.empty_like(x1), torch.empty_like(x1), to_output, *(like_parameter(p, x1) for p in rest[3:10])


_PARAMETERS = ", ".join(
    f"Tensor? {name}" for name in ("weight_x", "bias_x", "weight_y", "bias_y", "weight_in", "bias_in", "gain")
)
define(
    "siamese_step_backward(Tensor? grad_x, Tensor? grad_y, Tensor grad_h, Tensor x1, Tensor y1, Tensor stats, "
    f"float scale, {_PARAMETERS}, int[] kinds) -> ({', '.join(['Tensor'] * 10)})",
    cpu=_backward,
    cuda=devices.in_triton("triton_siamese", "backward"),
    fake=_backward_shapes,
)
define(
    f"siamese_step(Tensor x, Tensor y, Tensor? output, float scale, {_PARAMETERS}, int[] kinds, float[] eps) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    cpu=_forward,
    cuda=devices.in_triton("triton_siamese", "forward"),
    fake=_forward_shapes,
    keep=_keep,
    differentiate=_differentiate,
)
