"""Dropout and stochastic depth on a sublayer's update, drawn once for all streams."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from siamesenorm.errors import TopologyError
from siamesenorm.residual.depth import depth_factor

Keep = Tensor | None
"""What an update is multiplied by; None leaves it as it is."""


class Drop(nn.Module):
    """Drop single features (`dropout`) and whole updates of a sample (`path`, first dimension); rescale the rest."""

    def __init__(self, dropout: float = 0.0, path: float = 0.0) -> None:
        super().__init__()
        for name, rate in (("dropout", dropout), ("drop_path", path)):
            if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate < 1:
                raise TopologyError.not_allowed(name, rate, "a rate from 0 to below 1")
        self.dropout, self.path = dropout, depth_factor(path)

    def forward(self, update: Tensor) -> Keep:
        """What an update of this shape is multiplied by in training: 0 or the rescaling; None in evaluation."""
        if not self.training:
            return None
        uniform = torch.rand(
            update.shape[:1] + (1,) * (update.dim() - 1) if update.dim() > 1 else (),
            device=update.device,
            dtype=torch.float32,
        )
        keep = ((uniform >= self.path) / (1 - self.path)).to(update.dtype)
        return keep * F.dropout(torch.ones_like(update), self.dropout) if self.dropout else keep

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"dropout={self.dropout}, path={float(self.path)}"
