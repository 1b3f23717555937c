# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""`siamesenorm::rms_norm` on a GPU, in Triton: what rms_norm.py says, for float32, bfloat16 and float16."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from siamesenorm.residual.kernels.triton_rows import (
    RMS,
    Launch,
    load,
    load_parameter,
    norm_gradient,
    statistics,
    store_sum,
    tile_of,
)


@triton.jit
def _norm_forward(
    x_pointer, weight, bias, out, rstd_pointer, eps, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    row, column, at, inside = tile_of(tl.program_id(0) * ROWS, rows, width, ROWS, BLOCK)
    x = load(x_pointer, at, inside)
    _, rstd = statistics(x, inside, width, eps, RMS)
    y = x * rstd * load_parameter(weight, 1.0, column, width) + load_parameter(bias, 0.0, column, width)
    tl.store(out + at, y, mask=inside)
    tl.store(rstd_pointer + row, rstd, mask=row < rows)


@triton.jit
def _norm_backward(
    grad_pointer,
    x_pointer,
    weight,
    rstd_pointer,
    out,
    sum_weight,
    sum_bias,
    rows,
    width,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    to_weight = tl.zeros((ROWS, BLOCK), tl.float32)
    to_bias = tl.zeros((ROWS, BLOCK), tl.float32)
    for start in range(tl.program_id(0) * ROWS, rows, tl.num_programs(0) * ROWS):
        row, column, at, inside = tile_of(start, rows, width, ROWS, BLOCK)
        grad, x = load(grad_pointer, at, inside), load(x_pointer, at, inside)
        rstd = load(rstd_pointer, row, row < rows)
        to_x = norm_gradient(grad * load_parameter(weight, 1.0, column, width), x, rstd, inside, width, RMS)
        tl.store(out + at, to_x, mask=inside)
        if sum_weight is not None:
            to_weight += grad * x * rstd
        if sum_bias is not None:
            to_bias += grad
    column = tl.arange(0, BLOCK)[None, :]
    store_sum(sum_weight, to_weight, column, width)
    store_sum(sum_bias, to_bias, column, width)


def forward(x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> tuple[Tensor, Tensor]:
    """Normalised rows in x's dtype, and 1 / sqrt(mean square + eps) of each in float32."""
    launch = Launch.over(x)
    x = x.contiguous()
    out, rstd = torch.empty_like(x), x.new_empty(x.shape[:-1], dtype=torch.float32)
    parameters = [launch.checked(p, x.shape[-1:]) for p in (weight, bias)]
    launch.run(_norm_forward, launch.tiles, x, *parameters, out, rstd, eps)
    return out, rstd


def backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, rstd: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of input, weight and bias; what is absent comes back empty."""
    launch = Launch.over(x)
    grad, x = launch.checked(grad, x.shape), x.contiguous()
    weight, rstd = launch.checked(weight, x.shape[-1:]), launch.checked(rstd, x.shape[:-1])
    out = torch.empty_like(x)
    sums = [launch.sums_for(p) for p in (weight, bias)]
    launch.run(_norm_backward, launch.programs, grad, x, weight, rstd, out, *sums)
    return out, launch.gradient(weight, sums[0]), launch.gradient(bias, sums[1])
