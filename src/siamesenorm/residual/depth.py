"""Numbers that differ from block to block, as tensors: blocks of one shape then share one compiled graph."""

from __future__ import annotations

import torch
from torch import Tensor


def depth_factor(value: float) -> Tensor:
    """A number without dimensions, on the CPU in float64 whatever the default device and dtype are.

    It is no buffer: a model that is made on ``meta``, moved or loaded cannot lose it. Operators take it as they take a
    Python number, in the dtype and on the device of the tensor beside it.
    """
    return torch.tensor(value, dtype=torch.float64, device="cpu")
