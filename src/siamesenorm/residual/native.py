"""The compiled CPU kernels: where they are found, when they may run, and the arguments of those in kernels.c.

They are optional. Where the package was installed without a C compiler, on other devices and in other dtypes, the
callers (norms.py, fused/siamese.py and, through layers/native.py, the layers) run the same equations with PyTorch's
operators. `disabled()` switches them off for a comparison.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

VERSION = 3
"""Of the structures; what was built from other sources is left alone. It stands in rows.h too."""
_enabled = True


class NormArgs(Structure):
    """`Norm` of kernels.c."""

    _fields_ = (
        ("present", c_int32),
        ("centred", c_int32),
        ("eps", c_float),
        ("stride", c_int32),
        *((name, c_void_p) for name in ("weight", "bias", "mean", "rstd", "grad_weight", "grad_bias")),
    )


class NormCallArgs(Structure):
    """`NormCall` of kernels.c."""

    _fields_ = (
        ("rows", c_int64),
        ("dim", c_int64),
        ("threads", c_int32),
        ("norm", NormArgs),
        *((name, c_void_p) for name in ("x", "grad", "out")),
    )


class StepCallArgs(Structure):
    """`StepCall` of kernels.c."""

    _fields_ = (
        ("rows", c_int64),
        ("dim", c_int64),
        ("threads", c_int32),
        ("scale", c_float),
        *((name, NormArgs) for name in ("norm_x", "norm_y", "norm_in")),
        *((name, c_void_p) for name in ("gain", "grad_gain", "x", "y", "output", "x1", "y1", "next_x", "h")),
        *((name, c_void_p) for name in ("grad_x", "grad_y", "grad_h", "out_x", "out_y", "out_output")),
    )


@functools.cache
def _load() -> tuple[ctypes.CDLL | None, str]:
    built = sorted(Path(__file__).parent.glob("_kernels*.so"))
    if not built:
        return None, "the package was installed without a C compiler"
    runtimes = sorted((Path(torch.__file__).parent / "lib").glob("lib*omp*.so*"))
    if not runtimes:
        return None, "torch brings no OpenMP runtime to share"
    try:
        # The kernels name OpenMP's functions without linking a runtime; torch's own is made visible to them.
        ctypes.CDLL(str(runtimes[0]), mode=ctypes.RTLD_GLOBAL)
        loaded = ctypes.CDLL(str(built[0]))
        version = loaded.siamesenorm_version()
    except (OSError, AttributeError) as error:
        return None, f"{built[0].name} does not load: {error}"
    if version != VERSION:
        return None, f"{built[0].name} is of version {version}, not {VERSION}; install the package again"
    return loaded, ""


def library() -> ctypes.CDLL | None:
    """The compiled library, or None where there is none of this version or torch brings no OpenMP runtime to share."""
    return _load()[0]


def absence() -> str:
    """Why there is no library; empty where there is one."""
    return _load()[1]


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Run everything with PyTorch's operators inside."""
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before


def plain(*tensors: Tensor | None) -> bool:
    """Whether the kernels exist and all these tensors are float32 on the CPU."""
    for t in tensors:  # a loop: this is asked hundreds of times for every token that is decoded
        if t is not None and not (t.is_cpu and t.dtype is torch.float32):
            return False
    return _enabled and library() is not None


def usable(x: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernels may touch x and the others: `plain`, and of x's shape or of one row's.

    The kernels know addresses only, so a vector must lie in one piece and be as wide as x.
    """
    return all(t is None or _fits(t, x.shape) for t in others) and plain(x, *others)


def _fits(t: Tensor, shape: torch.Size) -> bool:
    return t.shape == shape or (t.shape == shape[-1:] and t.is_contiguous())


def call(name: str, arguments: Structure) -> None:
    """Run one kernel on its structure."""
    if _kernel(name)(ctypes.byref(arguments)):
        raise MemoryError(f"no memory left for {name}")


@functools.cache
def _kernel(name: str) -> Any:
    return getattr(library(), f"siamesenorm_{name}")


def address(tensor: Tensor | None) -> int | None:
    """Where a contiguous tensor's data begins."""
    return None if tensor is None else tensor.data_ptr()


def norm_args(
    centred: bool,
    eps: float,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None = None,
    rstd: Tensor | None = None,
    grad_weight: Tensor | None = None,
    grad_bias: Tensor | None = None,
) -> NormArgs:
    """A norm that is present; without room for its statistics they are not kept."""
    tensors = (weight, bias, mean, rstd, grad_weight, grad_bias)
    return NormArgs(1, centred, eps, rstd is not None, *map(address, tensors))


def size_of(x: Tensor) -> tuple[int, int, int]:
    """Rows, width and threads."""
    dim = x.shape[-1]
    return x.numel() // dim, dim, torch.get_num_threads()
