"""Rows that are never mixed with each other: independent Hyper-Connections, and plain widening of the stream."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from siamesenorm.residual.base import Link, Topology
from siamesenorm.residual.drop import Keep
from siamesenorm.residual.manifold import LearnedCollapse
from siamesenorm.residual.options import Options, option
from siamesenorm.residual.places import Place
from siamesenorm.residual.rows import Rows, RowsLink, Weighed, project_rows, weigh_rows
from siamesenorm.residual.summands import Sum

STD = 0.02


class IndependentLink(RowsLink):
    """Independent Hyper-Connections."""

    equation = (
        "h = sum_j (σ(a_1 m_1 + b_1)_j + eps) R_j;  R_j = R_j + (2 σ(a_2 m_2 + b_2)_j + eps) F(N h),  m = W vec(R)/rms"
    )

    def __init__(self, norm: nn.Module, dim: int, rate: int, eps: float, norm_eps: float) -> None:
        super().__init__()
        self.norm, self.rate, self.eps, self.norm_eps = norm, rate, eps, norm_eps
        self.W = nn.Parameter(torch.empty(2 * rate, rate * dim))
        self.b = nn.Parameter(torch.empty(2 * rate))
        self.a = nn.Parameter(torch.empty(2))
        self.reset_parameters()

    def no_weight_decay(self) -> set[str]:
        """Biases and scales: their start is the meaning."""
        return {"a", "b"}

    def width_sums(self) -> set[str]:
        """W."""
        return {"W"}

    def reset_parameters(self) -> None:
        """W ~ N(0, .02), a = .01, b_1 = -ln(n-1), b_2 = 0: rows are read by about 1/n and written by about 1."""
        nn.init.normal_(self.W, std=STD)
        nn.init.constant_(self.a, 0.01)
        with torch.no_grad():
            self.b[: self.rate].fill_(equal_share(self.rate))
            self.b[self.rate :].zero_()

    def connections(self, R: Tensor) -> tuple[Tensor, Tensor]:
        """What each row is read with and written with, each (..., n)."""
        read, write = project_rows(R, self.W, self.norm_eps).split(self.rate, -1)
        b_1, b_2 = self.b.split(self.rate)
        a_1, a_2 = self.a
        return torch.sigmoid(a_1 * read + b_1) + self.eps, 2 * torch.sigmoid(a_2 * write + b_2) + self.eps

    def read(self, R: Tensor) -> tuple[Weighed, Tensor]:
        """The rows with what each will be written with; N of their weighted sum."""
        reads, writes = self.connections(R)
        return (R, writes), self.norm(weigh_rows(reads, R))

    def weights(self, rows: Tensor) -> Tensor:
        """What each row is read with."""
        return self.connections(rows)[0]


def equal_share(rate: int) -> float:
    """The logit of 1/n."""
    return -math.log(max(rate - 1, 1))


@dataclass(frozen=True)
class IndependentOptions(Options):
    """The rate."""

    rate: int = option(4, "n, the number of rows", low=1, high=64)
    eps: float = option(1e-6, "added to every weight", low=0, high=1)


class Independent(Rows):
    """Independent Hyper-Connections."""

    name = "ihc"
    about = """
    Independent Hyper-Connections, as Tencent's HY-V4 runs them: rows are weighed token by token, never mixed.

    A norm follows the weighted sum that a sublayer reads; the norm of the rows that makes the weights is another one.
    """
    equation = "h = sum_j p_j R_j;  R_j = R_j + s_j F(N h),  p = σ(·), s = 2σ(·)"
    end = "N(sum_j σ(·)_j R_j)"
    arxiv = "–"
    options_class = IndependentOptions
    options: IndependentOptions
    drawing = """
 R (n rows) ──┬───────────────────────────────────(+)──▶ R
              └──▶ Σ p_j R_j ──▶ N ──▶ F ──▶ ⊗ s ───┘

 start: n copies of embed        end: N(Σ σ(·)_j R_j)
 p = σ(·)   s = 2σ(·), both from the token's own rows"""

    def setup(self) -> None:
        """The rows' last weights."""
        n, eps = self.options.rate, self.options.eps
        self.collapse = LearnedCollapse(self.dim, n, eps, self.norms.eps, STD, 0.01, equal_share(n))

    def link(self, place: Place) -> Link:
        """Weights of its own for every sublayer."""
        return IndependentLink(self.norm("input"), self.dim, self.options.rate, self.options.eps, self.norms.eps)

    def close(self, streams: Tensor) -> Tensor:
        """N of the weighted rows."""
        return super().close(self.collapse(streams))

    def end_weights(self, rows: Tensor) -> Tensor:
        """The token's own."""
        return self.collapse.weights(rows)


class WidenLink(Link):
    """Static widening."""

    equation = "h = sum_j a_j R_j;  R_i = R_i + F(N h), i each row in turn"

    def __init__(self, norm: nn.Module, rate: int, row: int) -> None:
        super().__init__()
        self.norm, self.row = norm, row
        self.a = nn.Parameter(torch.empty(rate))
        self.reset_parameters()

    def no_weight_decay(self) -> set[str]:
        """The weights of the rows."""
        return {"a"}

    def reset_parameters(self) -> None:
        """a = 1/n."""
        nn.init.constant_(self.a, 1 / self.a.numel())

    def read(self, R: tuple[Tensor, ...]) -> tuple[tuple[Tensor, ...], Tensor]:
        """Unchanged rows; N of their weighted sum."""
        h = self.a[0] * R[0]
        for weight, row in zip(self.a[1:], R[1:], strict=True):
            h = h + weight * row
        return R, self.norm(h)

    def write(self, R: tuple[Tensor, ...], output: Tensor, keep: Keep = None) -> tuple[Tensor, ...]:
        """The output to one row."""
        return *R[: self.row], R[self.row] + self.dropped(output, keep), *R[self.row + 1 :]

    def summands(self, R: tuple[Tensor, ...], previous: Link | None) -> Sum:
        """The weighed rows, then N."""
        return Sum.weighed(self.a, R, self.norm)


@dataclass(frozen=True)
class WidenOptions(Options):
    """The rate."""

    rate: int = option(4, "n, the number of rows", low=1, high=64)


class Widen(Topology):
    """Static widening (arXiv 2608.30320)."""

    name = "widen"
    about = """
    Static widening: each sublayer writes to one of n rows, in turn, and reads a learned sum of all.

    The ablation of arXiv 2608.30320. How rows start and end is not published: n copies of the embedding, a = 1/n, and
    their sum [our choice]; at the start it is Pre-Norm with an embedding n times as large.
    """
    equation = "h = sum_j a_j R_j;  R_(i mod n) = R_(i mod n) + F(N h)"
    end = "N(sum of rows)"
    arxiv = "2608.30320"
    streams = "n"
    kind = "pre"
    options_class = WidenOptions
    options: Any
    drawing = """
 R (n rows) ──┬────────────────────────────(+)──▶ R      sublayer i writes to row i mod n
              └──▶ Σ a_j R_j ──▶ N ──▶ F ───┘

 start: n copies of embed        end: N(sum of rows)        a: n learned numbers per sublayer"""

    def link(self, place: Place) -> Link:
        """The rows in turn."""
        return WidenLink(self.norm("input"), self.options.rate, place.index % self.options.rate)

    def open(self, x: Tensor) -> tuple[Tensor, ...]:
        """n copies of the embedding."""
        return tuple(x.view_as(x) for _ in range(self.options.rate))

    def close(self, streams: tuple[Tensor, ...]) -> Tensor:
        """N of the sum of rows."""
        return super().close(sum(streams[1:], streams[0]))

    def summands_at_end(self, streams: tuple[Tensor, ...], last: Link) -> Sum:
        """The rows, then N."""
        return Sum(list(streams), [1.0] * len(streams), self.final_norm)

    def named_streams(self, streams: tuple[Tensor, ...]) -> dict[str, Tensor]:
        """One name a row."""
        return {f"h{row}": stream for row, stream in enumerate(streams)}
