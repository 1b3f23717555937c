"""Gates and mixing weights are computed in float32, whatever precision the streams have and autocast asks for."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext

import torch
from torch import Tensor

LOW_PRECISION = (torch.bfloat16, torch.float16)


def without_autocast(beside: Tensor) -> AbstractContextManager[object]:
    """A context in which autocast rounds nothing on the device of a tensor."""
    device = beside.device.type
    if device == "meta" or not torch.is_autocast_enabled(device):
        return nullcontext()
    return torch.autocast(device, enabled=False)


def widened(x: Tensor) -> Tensor:
    """x in float32 where it is in a lower precision; unchanged otherwise."""
    return x.float() if x.dtype in LOW_PRECISION else x
