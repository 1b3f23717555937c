"""The linear layer; on CPU, a few rows at a time (decoding) run in a compiled kernel that uses all threads."""

from __future__ import annotations

from collections.abc import Callable

import torch.nn.functional as F
from torch import Tensor, nn

from siamesenorm.layers.kernels import decode


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """``x @ weight.T + bias`` as `torch.nn.functional.linear`."""
    few = decode.linear(x, weight, bias)
    return F.linear(x, weight, bias) if few is None else few


class Linear(nn.Linear):
    """`torch.nn.Linear`, through `linear`, or through what a model that is spread puts into its place."""

    product: Callable[[Tensor, Tensor, Tensor | None], Tensor] = staticmethod(linear)

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        return self.product(input, self.weight, self.bias)
