# mypy: allow-untyped-defs, allow-incomplete-defs, allow-untyped-decorators
"""What the Triton kernels share: tiles of rows, a norm and its gradient on them, and how they are launched.

A program holds tiles of whole rows in registers, masked to their width. Whatever dtypes the tensors have, everything is
computed in float32 and rounded where it is stored. Backward runs as many programs as the device has room for, each
over every so many tiles; a program leaves one row of sums for each parameter, and these rows are added up in a fixed
order, so that gradients are the same in every run.

Imported only where Triton is. The equations stand in the plain forms of rms_norm.py and siamese_step.py.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from siamesenorm.residual.kernels import siamese_step

TILE = 2048
"""Elements that a program holds of each tensor; a wider row is a tile alone."""
ELEMENTS_PER_THREAD = 8
MOST_THREADS = 1024
"""Of a program, on any GPU."""
THREADS_AT_ONCE = 512
"""On one processor, with the 128 registers each that backward needs; a program of more has a processor to itself."""
INTERPRETED_PROGRAMS = 3
"""Of a pass that gathers sums in Triton's interpreter, which has no processors to count."""

ABSENT, RMS, LAYER = (tl.constexpr(kind) for kind in (siamese_step.ABSENT, siamese_step.RMS, siamese_step.LAYER))


@triton.jit
def tile_of(start, rows, width, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """A tile's rows (a column of numbers), columns (a row of them), offsets, and which of these are inside."""
    row = start + tl.arange(0, ROWS)[:, None]
    column = tl.arange(0, BLOCK)[None, :]
    return row, column, row.to(tl.int64) * width + column, (row < rows) & (column < width)


@triton.jit
def load(pointer, at, inside):
    """Elements in float32; 0 outside."""
    return tl.load(pointer + at, mask=inside, other=0.0).to(tl.float32)


@triton.jit
def load_parameter(pointer, absent: tl.constexpr, column, width):
    """A weight, bias or gain as a row; `absent` throughout where there is none."""
    return tl.full(column.shape, absent, tl.float32) if pointer is None else load(pointer, column, column < width)


@triton.jit
def statistics(x, inside, width, eps, KIND: tl.constexpr):
    """Mean and 1 / sqrt(mean square around it + eps) of each row; 0 and 1 where the norm has none."""
    mean = tl.zeros((x.shape[0], 1), tl.float32)
    rstd = tl.full((x.shape[0], 1), 1.0, tl.float32)
    if KIND == LAYER:
        mean = tl.sum(tl.where(inside, x, 0.0), 1, keep_dims=True) / width
    if KIND != ABSENT:
        around = tl.where(inside, x - mean, 0.0)
        rstd = tl.rsqrt(tl.sum(around * around, 1, keep_dims=True) / width + eps)
    return mean, rstd


@triton.jit
def norm_gradient(grad, centred, rstd, inside, width, KIND: tl.constexpr):
    """Gradient of a norm's input, 0 outside, from that of its output times the weight, which is 0 there too."""
    if KIND != ABSENT:
        slope = tl.sum(grad * centred, 1, keep_dims=True) * rstd * rstd / width
        if KIND == LAYER:
            grad -= tl.sum(grad, 1, keep_dims=True) / width
        grad = tl.where(inside, rstd * (grad - centred * slope), 0.0)
    return grad


@triton.jit
def store_sum(pointer, tile, column, width):
    """One row for this program: the sum of a tile's rows; nothing where there is no such parameter."""
    if pointer is not None:
        row = tl.program_id(0).to(tl.int64) * width
        tl.store(pointer + row + column, tl.sum(tile, 0, keep_dims=True), mask=column < width)


@dataclass(frozen=True)
class Launch:
    """How the rows of one tensor are shared out between programs."""

    device: torch.device
    rows: int
    width: int
    tile_rows: int
    block: int

    @property
    def threads(self) -> int:
        """Threads of a program."""
        return min(max(self.tile_rows * self.block // ELEMENTS_PER_THREAD, 64), MOST_THREADS)

    @property
    def warps(self) -> int:
        """The same in what a GPU counts in: 32 threads, on AMD's 64."""
        return self.threads // (32 if torch.version.hip is None else 64)

    @classmethod
    def over(cls, x: Tensor) -> Launch:
        """Tiles of whole rows of x."""
        width = x.shape[-1]
        block = triton.next_power_of_2(max(width, 1))
        tile_rows = max(TILE // block, 1)
        return cls(x.device, x.numel() // max(width, 1), width, tile_rows, block)

    @property
    def tiles(self) -> int:
        """Programs of a pass that takes one tile in each."""
        return -(-self.rows // self.tile_rows)

    @property
    def programs(self) -> int:
        """Programs of a pass that gathers sums: as many as run at once, no more than there are tiles."""
        at_once = INTERPRETED_PROGRAMS
        if self.device.type == "cuda":
            at_once = _processors(self.device) * max(THREADS_AT_ONCE // self.threads, 1)
        return min(self.tiles, at_once)

    def checked(self, tensor: Any, shape: Sequence[int]) -> Any:
        """A tensor (or None) in one piece, which must have this shape: kernels know addresses only."""
        if tensor is None:
            return None
        if tuple(tensor.shape) != tuple(shape) or tensor.device != self.device:
            raise RuntimeError(
                f"kernel: a tensor of shape {tuple(shape)} on {self.device} is needed, "
                f"got one of shape {tuple(tensor.shape)} on {tensor.device}"
            )
        return tensor.contiguous()

    def run(self, kernel: Any, programs: int, *arguments: Any, **constants: int) -> None:
        """Start a kernel, whose last arguments are rows and width; nothing is done for no rows."""
        if not programs or not self.width:
            return
        with torch.cuda.device(self.device if self.device.type == "cuda" else -1):
            kernel[(programs,)](
                *arguments,
                self.rows,
                self.width,
                ROWS=self.tile_rows,
                BLOCK=self.block,
                num_warps=self.warps,
                **constants,
            )

    def sums_for(self, parameter: Tensor | None) -> Tensor | None:
        """Room for one row of sums a program, where there is such a parameter."""
        if parameter is None:
            return None
        return torch.empty(self.programs, self.width, dtype=torch.float32, device=self.device)

    def gradient(self, parameter: Tensor | None, sums: Tensor | None) -> Tensor:
        """A parameter's gradient from the programs' sums; empty where there is no such parameter."""
        if parameter is None or sums is None:
            return torch.empty(0, dtype=torch.float32, device=self.device)
        return sums.sum(0).to(parameter.dtype)


@functools.cache
def _processors(device: torch.device) -> int:
    return torch.cuda.get_device_properties(device).multi_processor_count
