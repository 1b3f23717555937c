"""Hyper-Connections: n copies of the stream, mixed by learned matrices around every sublayer."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from siamesenorm.residual.base import Link
from siamesenorm.residual.options import Options, option
from siamesenorm.residual.places import Place
from siamesenorm.residual.precision import widened, without_autocast
from siamesenorm.residual.rows import Rows, RowsLink, Weighed, mix_rows, weigh_rows


class HyperLink(RowsLink):
    """Hyper-Connections."""

    equation = "h = A_m^T H;  H = B^T F(N h) + A_r^T H"

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

    def depth_powers(self) -> dict[str, float]:
        """What mixes the rows on their way."""
        return {"A_r": 1.0, "W_r": 1.0} if self.dynamic else {"A_r": 1.0}

    def width_sums(self) -> set[str]:
        """What rows are multiplied by to change the connections."""
        return {"W_b", "W_m", "W_r"} if self.dynamic else set()

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

    def read(self, H: Tensor) -> tuple[Weighed, Tensor]:
        """((A_r^T H, B), N(A_m^T H))."""
        A_m, A_r, B = self.connections(H)
        mixed = mix_rows(A_r.transpose(-1, -2), H)
        return (mixed, B), self.norm(weigh_rows(A_m, H))

    def connections(self, H: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """A_m (..., n), A_r (..., n, n) and B (..., n), each static part plus what this token's rows ask for."""
        if not self.dynamic:
            return self.A_m, self.A_r, self.B
        with without_autocast(H):
            rows = widened(self.row_norm(H))
            W = torch.cat([self.W_m.unsqueeze(-1), self.W_b.unsqueeze(-1), self.W_r], -1).to(rows.dtype)
            asked = torch.tanh(rows @ W)
            A_m = self.A_m + self.scale_a * asked[..., 0]
            B = self.B + self.scale_b * asked[..., 1]
            A_r = self.A_r + self.scale_a * asked[..., 2:]
        return A_m, A_r, B

    def weights(self, rows: Tensor) -> Tensor:
        """A_m."""
        return self.connections(rows)[0]


@dataclass(frozen=True)
class HyperOptions(Options):
    """Rate and kind of the connections."""

    rate: int = option(2, "n, the number of rows", low=1, high=64)
    dynamic: bool = option(True, "let each token change the connections; false: learned constants only")


class Hyper(Rows):
    """Hyper-Connections (arXiv 2409.19606)."""

    name = "hyper"
    about = """
    Hyper-Connections: ``h = A_m^T H; H = B^T F(N h) + A_r^T H``. arXiv 2409.19606.
    """
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
        return super().close(streams.sum(-2))

    def end_weights(self, rows: Tensor) -> Tensor:
        """1 each."""
        return rows.new_ones(self.options.rate)
