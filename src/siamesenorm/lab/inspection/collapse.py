"""Stream collapse: whether several streams still say different things, depth by depth.

The largest one's share is that of its energy, ``max_j |R_j|² / sum_j |R_j|²``: 1/n where all are of one size, 1 where
one has taken over. Similarity is the mean cosine of all pairs: 1 where all are one stream up to a scale. Both are means
over tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from siamesenorm.lab.inspection.probe import Probe, StreamView, wide
from siamesenorm.lab.inspection.result import Collapse
from siamesenorm.residual.flow import Streams


class StreamCollapse(Probe):
    """Two numbers at every depth that has several streams."""

    def __init__(self, view: StreamView) -> None:
        super().__init__(view)
        self.largest: list[float | None] = []
        self.cosine: list[float | None] = []

    def at_depth(self, depth: int, streams: Streams) -> None:
        """Of all streams together."""
        rows = list(self.view.rows(streams).values())
        self.largest.append(largest_share(rows) if len(rows) > 1 else None)
        self.cosine.append(mean_cosine(rows) if len(rows) > 1 else None)

    @property
    def found(self) -> Collapse | None:
        """None where there is never more than one stream."""
        if all(value is None for value in self.largest):
            return None
        return Collapse(largest=tuple(self.largest), cosine=tuple(self.cosine))


def largest_share(rows: list[Tensor]) -> float:
    """Of the energy of streams (tokens, dim)."""
    energies = torch.stack([wide(row).square().sum(-1) for row in rows])
    return float((energies.amax(0) / energies.sum(0)).mean())


def mean_cosine(rows: list[Tensor]) -> float:
    """Of all pairs of streams (tokens, dim), by the length of the sum of their directions."""
    units = [torch.nn.functional.normalize(wide(row), dim=-1) for row in rows]
    squares = sum(unit.square().sum(-1) for unit in units)
    together = sum(units[1:], units[0]).square().sum(-1)
    return float(((together - squares) / (len(units) * (len(units) - 1))).mean())
