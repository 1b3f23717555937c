"""Streams of several rows: what topologies share whose stream is ``R`` of shape (..., n, d), one row per copy.

Between `read` and `write` the stream is the pair of the rows and the weights with which each row receives the output.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from siamesenorm.residual.base import Link, Topology
from siamesenorm.residual.drop import Keep
from siamesenorm.residual.norms import inverse_rms
from siamesenorm.residual.precision import widened, without_autocast
from siamesenorm.residual.summands import Sum

Weighed = tuple[Tensor, Tensor]


def mix_rows(matrix: Tensor, rows: Tensor) -> Tensor:
    """``matrix @ rows`` for (..., n, n) and (..., n, d), in the rows' precision: autocast would round the streams."""
    with without_autocast(rows):
        return matrix.to(rows.dtype) @ rows


def weigh_rows(weights: Tensor, rows: Tensor) -> Tensor:
    """The weighted sum of the rows: (..., n) and (..., n, d) to (..., d)."""
    return mix_rows(weights.unsqueeze(-2), rows).squeeze(-2)


def add_to_rows(rows: Tensor, weights: Tensor, output: Tensor) -> Tensor:
    """An output (..., d) added to every row (..., n, d) with that row's weight (..., n), in one pass."""
    n, d = rows.shape[-2:]
    weights = weights.to(rows.dtype).expand(*rows.shape[:-1])
    with without_autocast(rows):
        added = torch.baddbmm(
            rows.reshape(-1, n, d), weights.reshape(-1, n, 1), output.to(rows.dtype).reshape(-1, 1, d)
        )
    return added.view(rows.shape)


def project_rows(rows: Tensor, matrix: Tensor, eps: float) -> Tensor:
    """``matrix @ vec(R) / rms(vec R)`` in float32: (..., n, d) and (m, n d) to (..., m)."""
    with without_autocast(rows):
        flat = widened(rows.flatten(-2))
        return flat @ matrix.to(flat.dtype).t() * inverse_rms(flat, eps)


class RowsLink(Link):
    """Writes to every row with that row's weight."""

    equation = "R_j = R_j + s_j O: the output goes to every row with that row's weight"

    norm: nn.Module

    def write(self, streams: Weighed, output: Tensor, keep: Keep = None) -> Tensor:
        """R + s O."""
        rows, weights = streams
        return add_to_rows(rows, weights, self.dropped(output, keep))

    def weights(self, rows: Tensor) -> Tensor:
        """What this link reads each row with: (..., n)."""
        raise NotImplementedError

    def summands(self, rows: Tensor, previous: Link | None) -> Sum:
        """The weighed rows, then N."""
        return Sum.weighed(self.weights(rows), rows.unbind(-2), self.norm)


class Rows(Topology):
    """Start with n equal rows."""

    beginning = "n copies of the embedding"

    streams = "n"
    kind = "pre"
    options: Any

    def open(self, x: Tensor) -> Tensor:
        """n copies of the embedding."""
        return x.unsqueeze(-2).repeat_interleave(self.options.rate, dim=-2)

    def end_weights(self, rows: Tensor) -> Tensor:
        """What each row comes into the end with: (..., n)."""
        return rows.new_full((self.options.rate,), 1 / self.options.rate)

    def summands_at_end(self, streams: Tensor, last: Link) -> Sum:
        """The weighed rows, then N."""
        return Sum.weighed(self.end_weights(streams), streams.unbind(-2), self.final_norm)

    def named_streams(self, streams: Tensor) -> dict[str, Tensor]:
        """One name a row."""
        return {f"h{row}": streams[..., row, :] for row in range(self.options.rate)}
