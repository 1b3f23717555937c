"""The compiled CPU kernels of kernels.c: a norm and the fused siamese step for float32 rows.

They are optional. Where the package was installed without a C compiler, on other devices and in other dtypes, the
callers in norms.py and fused/siamese.py run the same equations with PyTorch's operators. `disabled()` switches them
off for a comparison.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
from collections.abc import Iterator
from ctypes import POINTER, Structure, c_float, c_int32, c_int64, c_void_p
from pathlib import Path

import torch
from torch import Tensor

_enabled = True


class NormArgs(Structure):
    """`Norm` of kernels.c."""

    _fields_ = (
        ("present", c_int32),
        ("centred", c_int32),
        ("eps", c_float),
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


FUNCTIONS = {
    "norm_forward": NormCallArgs,
    "norm_backward": NormCallArgs,
    "step_forward": StepCallArgs,
    "step_again": StepCallArgs,
    "step_backward": StepCallArgs,
}


@functools.cache
def library() -> ctypes.CDLL | None:
    """The compiled library, or None where it was not built or torch brings no OpenMP runtime to share."""
    built = sorted(Path(__file__).parent.glob("_kernels*.so"))
    runtimes = sorted((Path(torch.__file__).parent / "lib").glob("lib*omp*.so*"))
    if not built or not runtimes:
        return None
    try:
        # The kernels name OpenMP's functions without linking a runtime; torch's own is made visible to them.
        ctypes.CDLL(str(runtimes[0]), mode=ctypes.RTLD_GLOBAL)
        loaded = ctypes.CDLL(str(built[0]))
        for name, arguments in FUNCTIONS.items():
            function = getattr(loaded, f"siamesenorm_{name}")
            function.argtypes, function.restype = (POINTER(arguments),), c_int32 if "forward" not in name else None
    except (OSError, AttributeError):
        return None
    return loaded


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Run everything with PyTorch's operators inside."""
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before


def usable(*tensors: Tensor | None) -> bool:
    """Whether the kernels exist and all of these are float32 tensors on the CPU."""
    return (
        _enabled
        and all(t is None or (t.dtype is torch.float32 and t.device.type == "cpu") for t in tensors)
        and library() is not None
    )


def call(name: str, arguments: Structure) -> None:
    """Run one kernel."""
    loaded = library()
    assert loaded is not None
    if getattr(loaded, f"siamesenorm_{name}")(ctypes.byref(arguments)):
        raise MemoryError(f"no memory left for the sums of {name}")


def address(tensor: Tensor | None) -> int | None:
    """Where a contiguous tensor's data begins."""
    return None if tensor is None else tensor.data_ptr()


def norm_args(
    centred: bool,
    eps: float,
    weight: Tensor | None,
    bias: Tensor | None,
    mean: Tensor | None,
    rstd: Tensor | None,
    grad_weight: Tensor | None = None,
    grad_bias: Tensor | None = None,
) -> NormArgs:
    """A norm that is present."""
    tensors = (weight, bias, mean, rstd, grad_weight, grad_bias)
    return NormArgs(1, centred, eps, *map(address, tensors))


def size_of(x: Tensor) -> tuple[int, int, int]:
    """Rows, width and threads."""
    dim = x.shape[-1]
    return x.numel() // dim, dim, torch.get_num_threads()
