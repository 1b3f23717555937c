"""The compiled CPU library, and the one place that checks tensors before C sees their addresses.

The library is optional: where the package was installed without a C compiler, on other devices and in other dtypes the
plain forms run. `disabled()` switches it off for a comparison; `absence()` says why it is missing.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import math
from collections.abc import Iterator
from ctypes import Structure
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from siamesenorm.residual.kernels.eager import planned

VERSION = 6
"""Of the structures; what was built from other sources is left alone. It stands in rows.h too."""
_enabled = True


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
    """The compiled library, or None where there is none of this version."""
    return _load()[0]


def absence() -> str:
    """Why there is no library; empty where there is one."""
    return _load()[1]


def allowed() -> bool:
    """Whether kernels, of whatever device, are not switched off."""
    return _enabled


def enabled() -> bool:
    """Whether the kernels exist and are not switched off."""
    return _enabled and library() is not None


@contextlib.contextmanager
def disabled() -> Iterator[None]:
    """Run everything in its plain form inside."""
    global _enabled
    before, _enabled = _enabled, False
    try:
        yield
    finally:
        _enabled = before


def takes(*tensors: Tensor | None) -> bool:
    """Whether the kernels exist and all these tensors are float32 on the CPU with something in them."""
    for t in tensors:  # a loop: this is asked hundreds of times for every token that is decoded
        if t is not None and not (t.is_cpu and t.dtype is torch.float32 and t.numel()):
            return False
    return enabled() and planned() != "cuda"


def whole(tensor: Tensor | None) -> Tensor | None:
    """The tensor in one piece, as `pointer` needs it."""
    return None if tensor is None else tensor.contiguous()


def pointer(tensor: Tensor | None, shape: tuple[int, ...], dtype: torch.dtype = torch.float32) -> int | None:
    """Where the data of a tensor begins, which must have this shape, lie in one piece, and be on the CPU.

    Every address that C sees comes from here, from `parts` or from `strided`.
    """
    if tensor is None:
        return None
    if tensor.shape != shape or not tensor.is_contiguous():
        raise RuntimeError(f"kernel: a tensor of shape {tuple(shape)} in one piece is needed, got {_about(tensor)}")
    return _address(tensor, dtype)


def parts(tensor: Tensor, shape: tuple[int, ...]) -> list[int]:
    """Where each part of such a tensor begins, along its first dimension."""
    first, step = pointer(tensor, shape), tensor.element_size() * math.prod(shape[1:])
    assert first is not None
    return [first + part * step for part in range(shape[0])]


def strided(tensor: Tensor, shape: tuple[int, ...]) -> int:
    """The same of a tensor whose last dimension lies in one piece, while others may have strides of their own."""
    if tensor.shape != shape or (tensor.shape[-1] > 1 and tensor.numel() and tensor.stride(-1) != 1):
        raise RuntimeError(
            f"kernel: a tensor of shape {tuple(shape)}, rows in one piece, is needed, got {_about(tensor)}"
        )
    return _address(tensor, torch.float32)


def _address(tensor: Tensor, dtype: torch.dtype) -> int:
    if not tensor.is_cpu or tensor.dtype is not dtype:
        raise RuntimeError(f"kernel: a tensor of {dtype} on the CPU is needed, got {_about(tensor)}")
    address = tensor.data_ptr()
    if not address and tensor.numel():
        raise RuntimeError(f"kernel: the memory of a tensor was given back, got {_about(tensor)}")
    return address


def _about(tensor: Tensor) -> str:
    return f"{tensor.dtype} of shape {tuple(tensor.shape)} with strides {tensor.stride()} on {tensor.device}"


def call(name: str, arguments: Structure) -> None:
    """Run one kernel on its structure."""
    if _kernel(name)(ctypes.byref(arguments)):
        raise MemoryError(f"no memory left for {name}")


@functools.cache
def _kernel(name: str) -> Any:
    return getattr(library(), f"siamesenorm_{name}")


def size_of(x: Tensor) -> tuple[int, int, int]:
    """Rows, width and threads."""
    return math.prod(x.shape[:-1]), x.shape[-1], torch.get_num_threads()
