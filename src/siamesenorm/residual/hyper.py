"""Hyper-Connections: n copies of the stream, mixed by learned matrices around every sublayer.

The stream is ``H`` of shape (..., n, d), one row a copy. Between `read` and `write` it is the pair of the mixed
rows and the weights with which each row receives the output.
"""

from __future__ import annotations

import math
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from siamesenorm.residual.base import Link, Topology
from siamesenorm.residual.drop import Keep
from siamesenorm.residual.norms import RMSNorm
from siamesenorm.residual.options import Options, option
from siamesenorm.residual.places import Place

Mixed = tuple[Tensor, Tensor]


def mix_rows(matrix: Tensor, rows: Tensor) -> Tensor:
    """``matrix @ rows`` for (..., n, n) and (..., n, d), in the rows' precision: autocast would round the streams."""
    device = rows.device.type
    with torch.autocast(device, enabled=False) if torch.amp.is_autocast_available(device) else nullcontext():
        return matrix.to(rows.dtype) @ rows


def weigh_rows(weights: Tensor, rows: Tensor) -> Tensor:
    """The weighted sum of the rows: (..., n) and (..., n, d) to (..., d)."""
    return (weights.unsqueeze(-1) * rows).sum(-2)


class RowsLink(Link):
    """What both kinds share: the output goes to every row with that row's weight."""

    def write(self, streams: Mixed, output: Tensor, keep: Keep = None) -> Tensor:
        """B^T O + mixed rows."""
        mixed, weights = streams
        return mixed + weights.unsqueeze(-1) * self.dropped(output, keep).unsqueeze(-2)


class HyperLink(RowsLink):
    """h = A_m^T H;  H = B^T F(N h) + A_r^T H."""

    def __init__(self, norm: nn.Module, dim: int, rate: int, index: int, dynamic: bool, row_norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.rate, self.index, self.dynamic = norm, rate, index, dynamic
        self.B = nn.Parameter(torch.empty(rate))
        self.A_m = nn.Parameter(torch.empty(rate))
        self.A_r = nn.Parameter(torch.empty(rate, rate))
        if dynamic:
            self.row_norm = row_norm
            self.W_b = nn.Parameter(torch.empty(dim))
            self.W_m = nn.Parameter(torch.empty(dim))
            self.W_r = nn.Parameter(torch.empty(dim, rate))
            self.scale_b = nn.Parameter(torch.empty(1))
            self.scale_a = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def no_weight_decay(self) -> set[str]:
        """The static connections."""
        return {"A_m", "A_r", "B"}

    def reset_parameters(self) -> None:
        """B = 1, A_m = e_(k mod n), A_r = I; dynamic W = 0 with scale .01: equal to Pre-Norm."""
        nn.init.ones_(self.B)
        nn.init.eye_(self.A_r)
        with torch.no_grad():
            self.A_m.zero_()
            self.A_m[self.index % self.rate] = 1.0
        if self.dynamic:
            for weight in (self.W_b, self.W_m, self.W_r):
                nn.init.zeros_(weight)
            for scale in (self.scale_b, self.scale_a):
                nn.init.constant_(scale, 0.01)

    def read(self, H: Tensor) -> tuple[Mixed, Tensor]:
        """((A_r^T H, B), N(A_m^T H))."""
        A_m, A_r, B = self.connections(H)
        mixed = mix_rows(A_r.transpose(-1, -2), H)
        return (mixed, B), self.norm(weigh_rows(A_m, H))

    def connections(self, H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A_m (..., n), A_r (..., n, n) and B (..., n), each static part plus what this token's rows ask for."""
        if not self.dynamic:
            return self.A_m, self.A_r, self.B
        rows = self.row_norm(H)
        A_m = self.A_m + self.scale_a * torch.tanh(rows @ self.W_m)
        A_r = self.A_r + self.scale_a * torch.tanh(rows @ self.W_r)
        B = self.B + self.scale_b * torch.tanh(rows @ self.W_b)
        return A_m, A_r, B


class Rows(Topology):
    """Start with n equal rows; what Hyper-Connections and mHC share."""

    streams = "n"
    kind = "several"
    options: Any

    def open(self, x: Tensor) -> Tensor:
        """n copies of the embedding."""
        return x.unsqueeze(-2).repeat_interleave(self.options.rate, dim=-2)

    @property
    def kept(self) -> float:
        """The rows, the rows normed, and the reading before and behind its norm."""
        return 2.0 * self.options.rate + 2.0

    def named_streams(self, streams: Tensor) -> dict[str, Tensor]:
        """One name a row."""
        return {f"h{row}": streams[..., row, :] for row in range(self.options.rate)}


@dataclass(frozen=True)
class HyperOptions(Options):
    """Rate and kind of the connections."""

    rate: int = option(2, "n, the number of rows", low=1, high=64)
    dynamic: bool = option(True, "let each token change the connections; false: learned constants only")


class Hyper(Rows):
    """Hyper-Connections: ``h = A_m^T H; H = B^T F(N h) + A_r^T H``. arXiv 2409.19606."""

    name = "hyper"
    equation = "h = A_m^T H;  H = B^T F(N h) + A_r^T H"
    end = "N(sum of rows)"
    arxiv = "2409.19606"
    options_class = HyperOptions
    options: HyperOptions
    drawing = """
 H (n rows) ──┬──▶ A_r^T H ─────────────────────(+)──▶ H
              └──▶ A_m^T H ──▶ N ──▶ F ──▶ ⊗ B ───┘

 start: n copies of embed        end: N(sum of rows)
 dynamic: each of A_m, A_r, B is its static part + scale · tanh(norm(H) W)"""

    def link(self, place: Place) -> Link:
        """One connection a sublayer, its read row in turn."""
        row_norm = self.norm("stream") if self.options.dynamic else nn.Identity()
        return HyperLink(self.norm("input"), self.dim, self.options.rate, place.index, self.options.dynamic, row_norm)

    def close(self, streams: Tensor) -> Tensor:
        """N of the sum of rows."""
        assert self.final_norm is not None
        return self.final_norm(streams.sum(-2))


def sinkhorn(logits: Tensor, steps: int) -> Tensor:
    """The doubly stochastic matrix that `steps` rounds of column and row normalisation make of exp(logits)."""
    for _ in range(steps):
        logits = logits - logits.logsumexp(-2, keepdim=True)  # columns sum to 1
        logits = logits - logits.logsumexp(-1, keepdim=True)  # rows sum to 1
    return logits.exp()


FAVOURED = 0.75
"""H_pre of the row that a sublayer of mHC favours at the start; the others share what is left to 1."""


class ManifoldLink(RowsLink):
    """x = H_res x + H_post^T F(N(H_pre x)), every H from the token's own rows."""

    def __init__(self, norm: nn.Module, dim: int, rate: int, index: int, sinkhorn_steps: int) -> None:
        super().__init__()
        self.norm, self.rate, self.index, self.sinkhorn_steps = norm, rate, index, sinkhorn_steps
        self.row_norm = RMSNorm(rate * dim, affine=False)
        outputs = rate + rate + rate * rate
        self.W = nn.Parameter(torch.empty(rate * dim, outputs))
        self.b_pre = nn.Parameter(torch.empty(rate))
        self.b_post = nn.Parameter(torch.empty(rate))
        self.b_res = nn.Parameter(torch.empty(rate, rate))
        self.alpha = nn.Parameter(torch.empty(3))
        self.reset_parameters()

    def no_weight_decay(self) -> set[str]:
        """Biases and scales: their start is the meaning."""
        return {"b_pre", "b_post", "b_res", "alpha"}

    def reset_parameters(self) -> None:
        """H_pre sums to 1, H_post = 1, H_res close to I: equal to Pre-Norm while all rows are equal.

        Each sublayer favours one row, in turn: read alike, equal rows would get equal gradients and stay equal.
        """
        nn.init.zeros_(self.W)
        others = (1 - FAVOURED) / (self.rate - 1)
        nn.init.constant_(self.b_pre, math.log(others / (1 - others)))
        nn.init.zeros_(self.b_post)
        with torch.no_grad():
            self.b_pre[self.index % self.rate] = math.log(FAVOURED / (1 - FAVOURED))
            self.b_res.copy_(5 * (torch.eye(self.rate, device=self.b_res.device) - 1))
        nn.init.constant_(self.alpha, 0.01)

    def read(self, x: Tensor) -> tuple[Mixed, Tensor]:
        """((H_res x, H_post), N(H_pre x))."""
        H_pre, H_post, H_res = self.connections(x)
        return (mix_rows(H_res, x), H_post), self.norm(weigh_rows(H_pre, x))

    def connections(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """H_pre in (0, 1), H_post in (0, 2), H_res doubly stochastic."""
        n = self.rate
        pre, post, res = (self.row_norm(x.flatten(-2)) @ self.W).split([n, n, n * n], dim=-1)
        H_pre = torch.sigmoid(self.alpha[0] * pre + self.b_pre)
        H_post = 2 * torch.sigmoid(self.alpha[1] * post + self.b_post)
        H_res = sinkhorn(self.alpha[2] * res.unflatten(-1, (n, n)) + self.b_res, self.sinkhorn_steps)
        return H_pre, H_post, H_res


@dataclass(frozen=True)
class ManifoldOptions(Options):
    """Rate, projection and end."""

    rate: int = option(4, "n, the number of rows", low=2, high=64)
    sinkhorn_steps: int = option(20, "rounds of column and row normalisation of H_res", low=1, high=1000)
    collapse: Literal["mean", "learned"] = option("mean", "how the rows become one at the end")


class Manifold(Rows):
    """Manifold-constrained Hyper-Connections. arXiv 2512.24880.

    ``x = H_res x + H_post^T F(N(H_pre x))``, H_pre a sigmoid, H_post twice a sigmoid, H_res doubly stochastic.
    The token-dependent weights start at zero, so that the start is exactly Pre-Norm, and H_pre uneven, so that the
    rows come apart [both our choice].
    """

    name = "mhc"
    equation = "x = H_res x + H_post^T F(N(H_pre x)),  H_res doubly stochastic"
    end = "N(mean or learned sum of rows)"
    arxiv = "2512.24880"
    options_class = ManifoldOptions
    options: ManifoldOptions
    drawing = """
 x (n rows) ──┬──▶ H_res x ──────────────────────────(+)──▶ x
              └──▶ H_pre x ──▶ N ──▶ F ──▶ ⊗ H_post ───┘

 start: n copies of embed        end: N(collapse of rows)
 H_pre = σ(·)   H_post = 2σ(·)   H_res = Sinkhorn(exp(·)), all from the token's own rows"""

    def setup(self) -> None:
        """The weights of a learned collapse."""
        self.collapse = nn.Parameter(torch.empty(self.options.rate)) if self.options.collapse == "learned" else None
        self._reset_collapse()

    def _reset_collapse(self) -> None:
        if self.collapse is not None:
            nn.init.constant_(self.collapse, 1 / self.options.rate)

    def reset_parameters(self) -> None:
        """Pre-Norm-equivalent start, collapse at the mean."""
        super().reset_parameters()
        self._reset_collapse()

    def link(self, place: Place) -> Link:
        """One set of mappings a sublayer, its favoured row in turn."""
        return ManifoldLink(self.norm("input"), self.dim, self.options.rate, place.index, self.options.sinkhorn_steps)

    def close(self, streams: Tensor) -> Tensor:
        """N of the collapsed rows."""
        assert self.final_norm is not None
        rows = streams.mean(-2) if self.collapse is None else weigh_rows(self.collapse, streams)
        return self.final_norm(rows)

    def no_weight_decay(self) -> set[str]:
        """The links' own, and the collapse weights."""
        return super().no_weight_decay() | (set() if self.collapse is None else {"collapse"})
