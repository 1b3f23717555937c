# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""`siamesenorm::siamese_step` on a GPU, in Triton: what siamese_step.py says, for float32, bfloat16 and float16.

X1, Y' and X' are rounded to the streams' dtype where they come to be, as in the plain form; what lies between,
N_Y(Y') and s, stays in float32.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from siamesenorm.residual.kernels import siamese_step
from siamesenorm.residual.kernels.triton_rows import (
    ABSENT,
    Launch,
    load,
    load_parameter,
    norm_gradient,
    statistics,
    store_sum,
    tile_of,
)


@triton.jit
def _rounded(x, pointer):
    """x as a tensor of this dtype would keep it."""
    return x.to(pointer.dtype.element_ty).to(tl.float32)


@triton.jit
def _affine(normed, weight, bias, column, width):
    return normed * load_parameter(weight, 1.0, column, width) + load_parameter(bias, 0.0, column, width)


@triton.jit
def _keep(stats, row, rows, mean, rstd):
    tl.store(stats + row, mean, mask=row < rows)
    tl.store(stats + rows + row, rstd, mask=row < rows)


@triton.jit
def _step_forward(
    x_pointer,
    y_pointer,
    output,
    x1_pointer,
    y1_pointer,
    next_x,
    h,
    stats,
    scale,
    eps_x,
    eps_y,
    eps_in,
    weight_x,
    bias_x,
    weight_y,
    bias_y,
    weight_in,
    bias_in,
    gain,
    rows,
    width,
    NORM_X: tl.constexpr,
    NORM_Y: tl.constexpr,
    NORM_IN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    row, column, at, inside = tile_of(tl.program_id(0) * ROWS, rows, width, ROWS, BLOCK)
    x, y = load(x_pointer, at, inside), load(y_pointer, at, inside)
    if output is not None:
        o = load(output, at, inside)
        y = _rounded(y + o, y_pointer)
        tl.store(y1_pointer + at, y, mask=inside)
        x = _rounded(x + scale * o, x_pointer)
        if NORM_X != ABSENT:
            tl.store(x1_pointer + at, x, mask=inside)
    mean, rstd = statistics(x, inside, width, eps_x, NORM_X)
    _keep(stats, row, rows, mean, rstd)
    x = _rounded(_affine((x - mean) * rstd, weight_x, bias_x, column, width), x_pointer)
    if NORM_X != ABSENT or output is not None:
        tl.store(next_x + at, x, mask=inside)
    mean, rstd = statistics(y, inside, width, eps_y, NORM_Y)
    _keep(stats + 2 * rows, row, rows, mean, rstd)
    s = x * load_parameter(gain, 1.0, column, width)
    s += _affine((y - mean) * rstd, weight_y, bias_y, column, width)
    mean, rstd = statistics(s, inside, width, eps_in, NORM_IN)
    _keep(stats + 4 * rows, row, rows, mean, rstd)
    tl.store(h + at, _affine((s - mean) * rstd, weight_in, bias_in, column, width), mask=inside)


@triton.jit
def _step_backward(
    grad_x,
    grad_y,
    grad_h,
    x1_pointer,
    y1_pointer,
    stats,
    scale,
    weight_x,
    bias_x,
    weight_y,
    bias_y,
    weight_in,
    bias_in,
    gain,
    out_x,
    out_y,
    out_output,
    sum_weight_x,
    sum_bias_x,
    sum_weight_y,
    sum_bias_y,
    sum_weight_in,
    sum_bias_in,
    sum_gain,
    rows,
    width,
    NORM_X: tl.constexpr,
    NORM_Y: tl.constexpr,
    NORM_IN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    to_weight_x = tl.zeros((ROWS, BLOCK), tl.float32)
    to_bias_x = tl.zeros((ROWS, BLOCK), tl.float32)
    to_weight_y = tl.zeros((ROWS, BLOCK), tl.float32)
    to_bias_y = tl.zeros((ROWS, BLOCK), tl.float32)
    to_weight_in = tl.zeros((ROWS, BLOCK), tl.float32)
    to_bias_in = tl.zeros((ROWS, BLOCK), tl.float32)
    to_gain = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row, column, at, inside = tile_of(start, rows, width, ROWS, BLOCK)
        mean_x, rstd_x = load(stats, row, row < rows), load(stats + rows, row, row < rows)
        mean_y, rstd_y = load(stats + 2 * rows, row, row < rows), load(stats + 3 * rows, row, row < rows)
        mean_in, rstd_in = load(stats + 4 * rows, row, row < rows), load(stats + 5 * rows, row, row < rows)

        # X' and s again
        around_x = load(x1_pointer, at, inside) - mean_x
        around_y = load(y1_pointer, at, inside) - mean_y
        next_x = _rounded(_affine(around_x * rstd_x, weight_x, bias_x, column, width), x1_pointer)
        g = load_parameter(gain, 1.0, column, width)
        around_s = next_x * g + _affine(around_y * rstd_y, weight_y, bias_y, column, width) - mean_in

        to_h = load(grad_h, at, inside)
        if sum_weight_in is not None:
            to_weight_in += to_h * around_s * rstd_in
        if sum_bias_in is not None:
            to_bias_in += to_h
        to_s = to_h * load_parameter(weight_in, 1.0, column, width)
        to_s = norm_gradient(to_s, around_s, rstd_in, inside, width, NORM_IN)
        if sum_gain is not None:
            to_gain += to_s * next_x
        if sum_weight_y is not None:
            to_weight_y += to_s * around_y * rstd_y
        if sum_bias_y is not None:
            to_bias_y += to_s
        to_next_x = to_s * g
        if grad_x is not None:
            to_next_x += load(grad_x, at, inside)
        if sum_weight_x is not None:
            to_weight_x += to_next_x * around_x * rstd_x
        if sum_bias_x is not None:
            to_bias_x += to_next_x

        to_y = to_s * load_parameter(weight_y, 1.0, column, width)
        to_y = norm_gradient(to_y, around_y, rstd_y, inside, width, NORM_Y)
        if grad_y is not None:
            to_y += load(grad_y, at, inside)
        to_x = to_next_x * load_parameter(weight_x, 1.0, column, width)
        to_x = norm_gradient(to_x, around_x, rstd_x, inside, width, NORM_X)
        tl.store(out_y + at, to_y, mask=inside)
        tl.store(out_x + at, to_x, mask=inside)
        if grad_y is not None:
            tl.store(out_output + at, to_y + scale * to_x, mask=inside)
    column = tl.arange(0, BLOCK)[None, :]
    store_sum(sum_weight_x, to_weight_x, column, width)
    store_sum(sum_bias_x, to_bias_x, column, width)
    store_sum(sum_weight_y, to_weight_y, column, width)
    store_sum(sum_bias_y, to_bias_y, column, width)
    store_sum(sum_weight_in, to_weight_in, column, width)
    store_sum(sum_bias_in, to_bias_in, column, width)
    store_sum(sum_gain, to_gain, column, width)


def forward(x: Tensor, y: Tensor, output: Tensor | None, scale: float, *rest: Any) -> tuple[Tensor, ...]:
    """X', Y', h, then X1 and the rows' statistics in float32; what is one of the others or an input is empty."""
    *parameters, kinds, eps = rest
    launch = Launch.over(x)
    x, y, output = x.contiguous(), launch.checked(y, x.shape), launch.checked(output, x.shape)
    parameters = [launch.checked(p, x.shape[-1:]) for p in parameters]
    constants = _constants(kinds)
    next_x, y1, h, x1 = siamese_step.made(x, output is not None, kinds)
    stats = x.new_empty(6, *x.shape[:-1], dtype=torch.float32)
    arguments = (x, y, output, x1, y1, next_x, h, stats, scale, *eps, *parameters)
    launch.run(_step_forward, launch.tiles, *arguments, **constants)
    return next_x, y1, h, x1, stats


def backward(grad_x: Tensor | None, grad_y: Tensor | None, grad_h: Tensor, *rest: Any) -> tuple[Tensor, ...]:
    """Gradients of X, Y, O and the parameters; what is absent comes back empty, O's where Y' was no output."""
    x1, y1, stats, scale, *parameters, kinds = rest
    launch = Launch.over(x1)
    x1 = x1.contiguous()
    inputs = [launch.checked(t, x1.shape) for t in (grad_x, grad_y, grad_h, x1, y1)]
    stats = launch.checked(stats, (6, *x1.shape[:-1]))
    parameters = [launch.checked(p, x1.shape[-1:]) for p in parameters]
    out = [torch.empty_like(x1), torch.empty_like(x1), x1.new_empty(0) if grad_y is None else torch.empty_like(x1)]
    sums = [launch.sums_for(p) for p in parameters]
    launch.run(_step_backward, launch.programs, *inputs, stats, scale, *parameters, *out, *sums, **_constants(kinds))
    return *out, *(launch.gradient(p, s) for p, s in zip(parameters, sums, strict=True))


def _constants(kinds: list[int]) -> dict[str, int]:
    if len(kinds) != 3 or not {*kinds} <= {siamese_step.ABSENT, siamese_step.RMS, siamese_step.LAYER}:
        raise RuntimeError(f"siamese_step: norms of the kinds {kinds} are not allowed")
    return dict(zip(("NORM_X", "NORM_Y", "NORM_IN"), kinds, strict=True))
