"""adaLN-Zero (DiT, arXiv 2212.09748): a condition shifts and scales what a sublayer sees and gates its update.

The norm that is modulated is the topology's own, without affine; the gate works on the update as it is written.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn


class Modulation(nn.Module):
    """(batch, dim) to `parts` vectors (batch, 1, dim): a projection of SiLU(condition) that starts at zero."""

    def __init__(self, dim: int, parts: int) -> None:
        super().__init__()
        self.parts = parts
        self.linear = nn.Linear(dim, parts * dim)

    def forward(self, condition: Tensor) -> tuple[Tensor, ...]:
        """Vectors that spread over the tokens."""
        return self.linear(F.silu(condition)).unsqueeze(1).chunk(self.parts, dim=-1)

    def width_sums(self) -> set[str]:
        """The projection."""
        return {"linear.weight"}

    def reset_parameters(self) -> None:
        """Zero: no shift, no scale, closed gates."""
        nn.init.zeros_(self.linear.weight)
        nn.init.zeros_(self.linear.bias)


def modulate(h: Tensor, shift: Tensor, scale: Tensor) -> Tensor:
    """``h * (1 + scale) + shift``."""
    return h * (1 + scale) + shift
