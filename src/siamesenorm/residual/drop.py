"""Dropout and stochastic depth on a sublayer's update, drawn once for all streams."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from siamesenorm.residual.errors import TopologyError


class Drop(nn.Module):
    """Drop single features (`dropout`) and whole updates of a sample (`path`, first dimension); rescale the rest."""

    def __init__(self, dropout: float = 0.0, path: float = 0.0) -> None:
        super().__init__()
        for name, rate in (("dropout", dropout), ("drop_path", path)):
            if isinstance(rate, bool) or not isinstance(rate, (int, float)) or not 0 <= rate < 1:
                raise TopologyError(f"{name}: {rate!r} is not allowed; it takes a rate from 0 to below 1")
        self.dropout, self.path = dropout, path

    def forward(self, update: Tensor) -> Tensor:
        """The update with a fresh draw in training, untouched in evaluation."""
        if not self.training:
            return update
        if self.dropout:
            update = F.dropout(update, self.dropout)
        if self.path:
            keep = update.new_empty((update.shape[0],) + (1,) * (update.dim() - 1)).bernoulli_(1 - self.path)
            update = update * (keep / (1 - self.path))
        return update

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"dropout={self.dropout}, path={self.path}"
