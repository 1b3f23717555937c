"""The linear layer; on CPU, a few rows at a time (decoding) run in a compiled kernel that uses all threads."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from siamesenorm.layers import native
from siamesenorm.residual.norms import runs_plain_eager


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` as `torch.nn.functional.linear`."""
    if not torch.is_grad_enabled() and runs_plain_eager(x, weight, bias) and native.linear_usable(x, weight, bias):
        return native.linear(x, weight, bias)
    return F.linear(x, weight, bias)


class Linear(nn.Linear):
    """`torch.nn.Linear`, through `linear`."""

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        return linear(input, self.weight, self.bias)
