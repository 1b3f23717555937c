"""Which kernels the operators have on a device: the compiled library on a CPU, Triton's on a GPU.

Triton is imported when the first tensor on a GPU asks for it; where it is missing the plain forms run.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable
from types import ModuleType
from typing import Any

import torch
from torch import Tensor

from siamesenorm.residual.kernels import native
from siamesenorm.residual.kernels.eager import planned

GPU_DTYPES = frozenset({torch.float32, torch.bfloat16, torch.float16})
WIDEST_ROW = 8192
"""On a GPU a row lies in the registers of one program."""
OLDEST_GPU = (8, 0)
"""Compute capability of the oldest NVIDIA GPUs that Triton compiles for."""


def takes(x: Tensor, *others: Tensor | None) -> bool:
    """Whether the kernels of x's device can take these tensors: right dtypes, all in one place, not empty."""
    return _triton_takes(x, *others) if x.is_cuda or planned() == "cuda" else native.takes(x, *others)


def _triton_takes(x: Tensor, *others: Tensor | None) -> bool:
    for t in (x, *others):
        if t is not None and not (t.device == x.device and t.dtype in GPU_DTYPES and t.numel()):
            return False
    runs = native.allowed() and x.shape[-1] <= WIDEST_ROW
    return runs and (planned() == "cuda" or _has_triton(x.device))


@functools.cache
def _has_triton(device: torch.device) -> bool:
    if torch.version.hip is None and torch.cuda.get_device_capability(device) < OLDEST_GPU:
        return False
    try:
        return all(map(_module, ("triton_norm", "triton_siamese")))
    except ImportError:
        return False


@functools.cache
def _module(name: str) -> ModuleType:
    # By name: these two files stay behind where the model's source is exported, and Triton may be missing anywhere.
    return importlib.import_module(f".{name}", __package__)


def in_triton(module: str, name: str) -> Callable[..., Any]:
    """The kernel `name` of one of the Triton modules, imported when it is first called."""
    return lambda *arguments: getattr(_module(module), name)(*arguments)
