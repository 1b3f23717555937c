"""Whether the host would wait for a device, seen on a CPU: who reads a tensor's numbers fails."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

WAITS = {"_local_scalar_dense", "equal", "is_nonzero", "masked_select", "nonzero", "_unique2", "unique_dim"}
"""Operators that give the host a number, or a shape that hangs on one."""
READS = ("tolist", "numpy", "item", "__bool__", "__float__", "__int__", "cpu")


class Waiting(TorchDispatchMode):
    """Fails where an operator would make the host wait for the device.

    model: its constants lie on the CPU wherever it lies itself (`residual/depth.py`); these may be read.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        found = (value for module in model.modules() for value in vars(module).values())
        self.constants = {id(value) for value in found if isinstance(value, torch.Tensor)}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        waits = func.overloadpacket.__name__ in WAITS and id(args[0]) not in self.constants
        assert not waits, f"{func} waits for the device"
        masks = args[1] if func.overloadpacket.__name__ in ("index", "index_put_") else ()
        assert not any(mask is not None and mask.dtype is torch.bool for mask in masks), f"{func} counts a mask"
        return func(*args, **(kwargs or {}))


def watched(read, constants):
    def look(tensor, *args, **kwargs):
        elsewhere = threading.current_thread() is not threading.main_thread()  # batches are made, checkpoints written
        assert elsewhere or id(tensor) in constants, "a tensor is read"
        return read(tensor, *args, **kwargs)

    return look


@contextlib.contextmanager
def never_read(model: torch.nn.Module) -> Iterator[None]:
    """Fail where the block waits for the device that a model lies on."""
    with pytest.MonkeyPatch.context() as patch, Waiting(model) as waiting:
        for name in READS:
            patch.setattr(torch.Tensor, name, watched(getattr(torch.Tensor, name), waiting.constants))
        yield
