"""The Gated Residual: n rows that are read through gates of every feature and written with a weight each."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from siamesenorm.residual.base import Link
from siamesenorm.residual.norms import RMSNorm
from siamesenorm.residual.options import Options, option
from siamesenorm.residual.places import Place
from siamesenorm.residual.precision import widened, without_autocast
from siamesenorm.residual.rows import Rows, RowsLink, Weighed
from siamesenorm.residual.summands import Sum

STD = 0.02


class GatedRows(nn.Module):
    """z_j = g_j n(R_j);  G = σ(W_u silu(W_d vec(z)/n));  h = mean_j(G_j z_j)."""

    def make_gates(self, dim: int, rate: int, rank: int, eps: float) -> None:
        """The parameters of a read."""
        self.row_norm = RMSNorm(dim, eps, affine=False)
        self.weight = nn.Parameter(torch.empty(rate, dim))
        self.W_d = nn.Parameter(torch.empty(rank, rate * dim))
        self.W_u = nn.Parameter(torch.empty(rate * dim, rank))

    def no_weight_decay(self) -> set[str]:
        """The gains, which are norms' gains of several rows."""
        return {"weight"}

    def width_sums(self) -> set[str]:
        """All matrices; the gates' rank grows with the width."""
        return {"W_d", "W_u"}

    def reset_parameters(self) -> None:
        """Gains 1, W ~ N(0, .02): gates near one half, which a following matrix takes as a scale."""
        nn.init.ones_(self.weight)
        nn.init.normal_(self.W_d, std=STD)
        nn.init.normal_(self.W_u, std=STD)

    def normed(self, R: Tensor) -> Tensor:
        """z, in one vector: (..., n d)."""
        return (self.row_norm(R) * self.weight).flatten(-2)

    def gates(self, z: Tensor) -> Tensor:
        """G of every feature of every row, (..., n, d), in float32 at least; its matrices in the model's precision."""
        low = F.silu(z @ self.W_d.t() / self.weight.shape[0])
        return torch.sigmoid(widened(low @ self.W_u.t())).unflatten(-1, self.weight.shape)

    def mixed(self, z: Tensor) -> Tensor:
        """The mean of the gated rows, in the rows' own dtype: (..., d)."""
        return (self.gates(z) * z.unflatten(-1, self.weight.shape)).mean(-2).to(z.dtype)

    def rows_in_mean(self, R: Tensor) -> Sum:
        """Every row's part of the mean; what it comes in with is its gates times its gains."""
        z = self.normed(R)
        gates, n = self.gates(z).to(z.dtype), self.weight.shape[0]
        sizes = (gates * self.weight).detach().float().abs().reshape(-1, *self.weight.shape).mean((0, -1)) / n
        return Sum(list((gates * z.unflatten(-1, self.weight.shape) / n).unbind(-2)), sizes.tolist())


class GatedRead(GatedRows):
    """A read without a write: how the stack ends."""

    def __init__(self, dim: int, rate: int, rank: int, eps: float) -> None:
        super().__init__()
        self.make_gates(dim, rate, rank, eps)
        self.reset_parameters()

    def forward(self, R: Tensor) -> Tensor:
        """(..., n, d) to (..., d)."""
        return self.mixed(self.normed(R))


class GatedLink(GatedRows, RowsLink):
    """Gated Residual."""

    equation = "z_j = g_j n(R_j);  h = mean_j(G_j z_j);  R_j = R_j + s_j F(h),  s = 2σ(W_w vec(z)/n)"

    def __init__(self, dim: int, rate: int, rank: int, eps: float) -> None:
        super().__init__()
        self.make_gates(dim, rate, rank, eps)
        self.W_w = nn.Parameter(torch.empty(rate, rate * dim))
        self.reset_parameters()

    def width_sums(self) -> set[str]:
        """W_w too."""
        return super().width_sums() | {"W_w"}

    def reset_parameters(self) -> None:
        """As every read, and W_w ~ N(0, .02): every row is written with about 1."""
        super().reset_parameters()
        nn.init.normal_(self.W_w, std=STD)

    def read(self, R: Tensor) -> tuple[Weighed, Tensor]:
        """((R, s), h)."""
        z = self.normed(R)
        return (R, self.injection(z)), self.mixed(z)

    def summands(self, rows: Tensor, previous: Link | None) -> Sum:
        """The gated rows."""
        return self.rows_in_mean(rows)

    def injection(self, z: Tensor) -> Tensor:
        """s, what each row is written with: (..., n)."""
        with without_autocast(z):
            wide = widened(z)
            return 2 * torch.sigmoid(wide @ self.W_w.to(wide.dtype).t() / self.W_w.shape[0])


@dataclass(frozen=True)
class GatedOptions(Options):
    """Rows, and the rank of their gates."""

    rate: int = option(4, "n, the number of rows", low=1, high=64)
    rank: int | None = option(None, "rank of the gates; default: an eighth of the width", low=1, high=65536)


class GatedResidual(Rows):
    """Gated Residual (arXiv 2608.30320)."""

    name = "gr"
    about = """
    Gated Residual, as Qwen3.8-Flash-Next runs it. arXiv 2608.30320.

    Every row has a gain of its own, gates of every feature choose from the rows, and no other norm stands before the
    sublayer. The end is a read of its own, in place of the final norm.
    """
    equation = "z_j = g_j n(R_j);  h = mean_j(G_j z_j);  R_j = R_j + s_j F(h)"
    end = "mean_j(G_j z_j)"
    arxiv = "2608.30320"
    has_final_norm = False
    options_class = GatedOptions
    options: GatedOptions
    drawing = """
 R (n rows) ──┬──────────────────────────────────────────(+)──▶ R
              └──▶ n, gains ──▶ mean of G ⊙ z ──▶ F ──▶ ⊗ s ┘

 start: n copies of embed        end: a read of its own
 G = σ(W_u silu(W_d z / n))   s = 2σ(W_w z / n), z all rows, normed"""

    def setup(self) -> None:
        """The last read."""
        self.rank = self.options.rank or max(1, self.dim // 8)
        self.last_read = GatedRead(self.dim, self.options.rate, self.rank, self.norms.eps)

    def link(self, place: Place) -> Link:
        """Gates of its own for every sublayer."""
        return GatedLink(self.dim, self.options.rate, self.rank, self.norms.eps)

    def close(self, streams: Tensor) -> Tensor:
        """The mean of the gated rows."""
        return self.last_read(streams)

    def summands_at_end(self, streams: Tensor, last: Link) -> Sum:
        """The gated rows."""
        return self.last_read.rows_in_mean(streams)

    def output_norms(self, last: Link) -> list[nn.Module]:
        """The last read, whose gains are a norm's."""
        return [self.last_read]
