"""Numbers that differ from block to block, as tensors: blocks of one shape then share one compiled graph."""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal

import torch
from torch import Tensor, nn

DepthScaling = Literal["none", "sqrt(2(l+1))", "sqrt(l+1)"]
DEPTH_SCALES: dict[str, Callable[[float], float]] = {
    "none": lambda l: 1.0,
    "sqrt(2(l+1))": lambda l: (2 * (l + 1)) ** 0.5,
    "sqrt(l+1)": lambda l: (l + 1) ** 0.5,
}
"""c_l by which updates are divided in block l, after arXiv 2602.08064."""


def depth_factor(value: float) -> Tensor:
    """A number without dimensions, on the CPU in float64 whatever the default device and dtype are.

    It is no buffer: a model that is made on ``meta``, moved or loaded cannot lose it. Operators take it as they take a
    Python number, in the dtype and on the device of the tensor beside it.
    """
    return torch.tensor(value, dtype=torch.float64, device="cpu")


def make_factors_plain(model: nn.Module) -> None:
    """Turn the depth factors of a model into Python numbers: for one that is compiled whole and ahead of time.

    To torch.compile a float64 tensor without dimensions on the CPU may be a number, which it finds out and starts
    again; compilation ahead of time (``aot_compile``) cannot start again and ends with an exception.
    """
    for module in model.modules():
        for name, value in vars(module).items():
            if isinstance(value, Tensor) and value.dim() == 0 and value.dtype == torch.float64:
                setattr(module, name, float(value))
