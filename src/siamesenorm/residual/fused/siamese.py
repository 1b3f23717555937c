"""The fused step of a siamese pair: ``(X, Y, O) → (X', Y', h)``.

    X1 = X + O/c          Y' = Y + O
    X' = N_X(X1)          s  = g * X' + N_Y(Y')          h = N_in(s)

N_X, g and N_in may each be absent. One autograd node keeps X1, Y' and a few numbers a row; X', N_Y(Y'), s and h
are made again in backward, because they cost a pass or two over memory each and nothing else needs them.
The reference is the plain `read` and `write` of `residual/siamese.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from siamesenorm.residual import native
from siamesenorm.residual.fused.recompute import attach
from siamesenorm.residual.norms import (
    Norm,
    NormCall,
    Stats,
    empty_like,
    empty_stats,
    normalize,
    normalize_backward,
    renormalize,
)

Params = tuple[Tensor | None, ...]  # weight and bias of N_X, N_Y and N_in, then g


class Plan(NamedTuple):
    """What of the step is present: O's scale for X, and the norms."""

    scale: float
    norm_x: NormCall | None
    norm_y: NormCall
    norm_in: NormCall | None


class Kept(NamedTuple):
    """All that backward needs beside the parameters."""

    x1: Tensor
    y1: Tensor
    stats: tuple[Stats | None, Stats, Stats | None]


def fused_step(
    x: Tensor,
    y: Tensor,
    output: Tensor,
    scale: float,
    norm_x: Norm | None,
    gain: Tensor | None,
    norm_y: Norm,
    norm_in: Norm | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """(X', Y', h) of the module's equations, differentiable once in every tensor."""
    plan = Plan(scale, _call(norm_x), norm_y.call, _call(norm_in))
    params = (*_affine(norm_x), *_affine(norm_y), *_affine(norm_in), gain)
    if not torch.is_grad_enabled():
        return _infer(plan, x, y, output, params)
    note: list[Kept] = []
    next_x, next_y, h = _FusedStep.apply(plan, note, x, y, output, *params)
    if h.requires_grad:
        (kept,) = note
        attach(h, lambda x1, y1: _make_h(Kept(x1, y1, kept.stats), params), (kept.x1, kept.y1))
    return next_x, next_y, h


def _call(norm: Norm | None) -> NormCall | None:
    return None if norm is None else norm.call


def _affine(norm: Norm | None) -> tuple[Tensor | None, Tensor | None]:
    return (None, None) if norm is None else (norm.weight, norm.bias)


def _infer(plan: Plan, x: Tensor, y: Tensor, output: Tensor, params: Params) -> tuple[Tensor, Tensor, Tensor]:
    """X', Y' and h where no backward will follow: the compiled kernel then keeps nothing."""
    if not (x.shape == y.shape == output.shape and native.usable(x, y, output, *params)):
        return _forward(plan, x, y, output, params)[:3]
    x, y, output = x.contiguous(), y.contiguous(), output.contiguous()
    next_x, y1, h = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
    norms = [
        native.NormArgs()
        if call is None
        else native.norm_args(call.kind == "layer", call.eps, *params[2 * k : 2 * k + 2])
        for k, call in enumerate((plan.norm_x, plan.norm_y, plan.norm_in))
    ]
    tensors = (params[6], None, x, y, output, next_x, y1, next_x, h)  # X1 and X' share their memory
    native.call(
        "step_forward", native.StepCallArgs(*native.size_of(x), plan.scale, *norms, *map(native.address, tensors))
    )
    return next_x, y1, h


def _forward(plan: Plan, x: Tensor, y: Tensor, output: Tensor, params: Params) -> tuple[Tensor, Tensor, Tensor, Kept]:
    if x.shape == y.shape == output.shape and native.usable(x, y, output, *params):
        return _native_forward(plan, x, y, output, params)
    wx, bx, wy, by, wi, bi, gain = params
    x1 = torch.add(x, output, alpha=plan.scale)
    y1 = y + output
    next_x, stats_x = x1, None
    if plan.norm_x is not None:
        next_x, stats_x = normalize(x1, plan.norm_x, wx, bx)
    normed_y, stats_y = normalize(y1, plan.norm_y, wy, by)
    h, stats_in = _join(next_x, normed_y, gain), None
    if plan.norm_in is not None:
        h, stats_in = normalize(h, plan.norm_in, wi, bi, inplace=True)
    return next_x, y1, h, Kept(x1, y1, (stats_x, stats_y, stats_in))


def _join(next_x: Tensor, normed_y: Tensor, gain: Tensor | None) -> Tensor:
    """g * X' + N_Y(Y'), written over the second where dtypes allow."""
    if next_x.dtype != normed_y.dtype:
        return normed_y + (next_x if gain is None else next_x * gain)
    return normed_y.add_(next_x) if gain is None else normed_y.addcmul_(next_x, gain)


def _make(kept: Kept, params: Params) -> tuple[Tensor, Tensor]:
    """X' and s again, from what was kept."""
    wx, bx, wy, by, _, _, gain = params
    stats_x, stats_y, _ = kept.stats
    next_x = kept.x1 if stats_x is None else renormalize(kept.x1, stats_x, wx, bx)
    return next_x, _join(next_x, renormalize(kept.y1, stats_y, wy, by), gain)


def _make_h(kept: Kept, params: Params) -> Tensor:
    """h again, from what was kept."""
    if native.usable(kept.x1, kept.y1, *params):
        return _native_make_h(kept, params)
    s, stats_in = _make(kept, params)[1], kept.stats[2]
    return s if stats_in is None else renormalize(s, stats_in, params[4], params[5], inplace=True)


class _FusedStep(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, plan: Plan, note: list[Kept], x: Tensor, y: Tensor, output: Tensor, *params: Any) -> Any:
        next_x, next_y, h, kept = _forward(plan, x, y, output, params)
        note.append(kept)
        ctx.plan, ctx.dtypes = plan, (x.dtype, y.dtype, output.dtype)
        ctx.stats = kept.stats
        ctx.save_for_backward(kept.x1, kept.y1, *params)
        return next_x, next_y, h

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_x: Tensor, grad_y: Tensor, grad_h: Tensor) -> Any:
        x1, y1, *params = ctx.saved_tensors
        grads = _backward(ctx.plan.scale, Kept(x1, y1, ctx.stats), tuple(params), grad_x, grad_y, grad_h)
        dtypes = zip(grads, ctx.dtypes, strict=False)  # X, Y and O; the parameters' gradients fit already
        return None, None, *(grad.to(dtype) for grad, dtype in dtypes), *grads[3:]


def _backward(
    scale: float, kept: Kept, params: Params, grad_x: Tensor, grad_y: Tensor, grad_h: Tensor
) -> tuple[Any, ...]:
    """Gradients of X, Y, O and the parameters."""
    if native.usable(kept.x1, kept.y1, grad_x, grad_y, grad_h, *params):
        return _native_backward(scale, kept, params, grad_x, grad_y, grad_h)
    wx, bx, wy, by, wi, bi, gain = params
    x1, y1, (stats_x, stats_y, stats_in) = kept
    gwx = gbx = gwi = gbi = ggain = None

    grad_s = grad_h
    if stats_in is not None:
        next_x, s = _make(kept, params)
        grad_s, gwi, gbi = normalize_backward(grad_h, s, stats_in, wi, bi)
    elif gain is not None:
        next_x = x1 if stats_x is None else renormalize(x1, stats_x, wx, bx)

    gy1, gwy, gby = normalize_backward(grad_s, y1, stats_y, wy, by)
    gy1 = gy1.add_(grad_y)
    if gain is not None:
        ggain = (grad_s * next_x).sum_to_size(gain.shape).to(gain.dtype)
        gx1 = torch.addcmul(grad_x, grad_s, gain)
    else:  # grad_s is ours to write over, unless it is grad_h itself
        gx1 = grad_x + grad_s if stats_in is None else grad_s.add_(grad_x)
    if stats_x is not None:
        gx1, gwx, gbx = normalize_backward(gx1, x1, stats_x, wx, bx)
    grad_output = torch.add(gy1, gx1, alpha=scale)
    return gx1, gy1, grad_output, gwx, gbx, gwy, gby, gwi, gbi, ggain


def _native_forward(
    plan: Plan, x: Tensor, y: Tensor, output: Tensor, params: Params
) -> tuple[Tensor, Tensor, Tensor, Kept]:
    x, y, output = x.contiguous(), y.contiguous(), output.contiguous()
    x1, y1, h = torch.empty_like(x), torch.empty_like(x), torch.empty_like(x)
    next_x = x1 if plan.norm_x is None else torch.empty_like(x)
    calls = (plan.norm_x, plan.norm_y, plan.norm_in)
    stats = tuple(None if call is None else empty_stats(x, call.kind) for call in calls)
    kept = Kept(x1, y1, stats)  # type: ignore[arg-type]  # N_Y is always present
    eps = [0.0 if call is None else call.eps for call in calls]
    native.call("step_forward", _step_args(kept, params, plan.scale, eps, x=x, y=y, output=output, next_x=next_x, h=h))
    return next_x, y1, h, kept


def _native_make_h(kept: Kept, params: Params) -> Tensor:
    h = torch.empty_like(kept.x1)
    native.call("step_again", _step_args(kept, params, h=h))
    return h


def _native_backward(
    scale: float, kept: Kept, params: Params, grad_x: Tensor, grad_y: Tensor, grad_h: Tensor
) -> tuple[Any, ...]:
    out_x, out_y, out_output = (torch.empty_like(kept.x1) for _ in range(3))
    grads = [empty_like(parameter) for parameter in params]
    grad_x, grad_y, grad_h = grad_x.contiguous(), grad_y.contiguous(), grad_h.contiguous()
    arguments = _step_args(
        kept, params, scale, grads=grads, grad_x=grad_x, grad_y=grad_y, grad_h=grad_h,
        out_x=out_x, out_y=out_y, out_output=out_output,
    )  # fmt: skip
    native.call("step_backward", arguments)
    return out_x, out_y, out_output, *grads


def _step_args(
    kept: Kept,
    params: Params,
    scale: float = 1.0,
    eps: Sequence[float] = (0.0, 0.0, 0.0),
    grads: Sequence[Tensor | None] = (None,) * 7,
    **tensors: Tensor,
) -> native.StepCallArgs:
    norms = []
    for k, stats in enumerate(kept.stats):
        if stats is None:
            norms.append(native.NormArgs())
            continue
        (weight, bias), (grad_weight, grad_bias) = params[2 * k : 2 * k + 2], grads[2 * k : 2 * k + 2]
        centred = stats.mean is not None
        norms.append(native.norm_args(centred, eps[k], weight, bias, *stats, grad_weight, grad_bias))
    addresses = {name: native.address(t) for name, t in {**tensors, "x1": kept.x1, "y1": kept.y1}.items()}
    gain, grad_gain = native.address(params[6]), native.address(grads[6])
    return native.StepCallArgs(*native.size_of(kept.x1), scale, *norms, gain, grad_gain, **addresses)
