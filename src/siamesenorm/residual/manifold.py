"""Manifold-constrained Hyper-Connections: rows mixed by doubly stochastic matrices of the token's own making.

`mhc` makes them by Sinkhorn's rounds, `mhc_lite` as a mean of permutations.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from siamesenorm.residual.base import Link
from siamesenorm.residual.kernels.sinkhorn import sinkhorn
from siamesenorm.residual.options import Options, option
from siamesenorm.residual.places import Place
from siamesenorm.residual.rows import Rows, RowsLink, Weighed, mix_rows, project_rows, weigh_rows

FAVOURED = 0.75
"""Weight of the row that a sublayer of mHC favours at the start; the others share what is left to 1."""


class ManifoldLink(RowsLink):
    """mHC, however H_res is made."""

    equation = "h = H_pre R;  R = H_res R + H_post^T F(N h), every H from the token's own rows"

    def __init__(self, norm: nn.Module, dim: int, rate: int, outputs: int, index: int, eps: float) -> None:
        super().__init__()
        self.norm, self.rate, self.index, self.norm_eps = norm, rate, index, eps
        self.W = nn.Parameter(torch.empty(rate + rate + outputs, rate * dim))
        self.b = nn.Parameter(torch.empty(rate + rate + outputs))
        self.a = nn.Parameter(torch.empty(3))
        self.reset_parameters()

    def no_weight_decay(self) -> set[str]:
        """Biases and scales: their start is the meaning."""
        return {"a", "b"}

    def width_sums(self) -> set[str]:
        """W."""
        return {"W"}

    def reset_parameters(self) -> None:
        """W = 0, a = .01, and the biases of `start`."""
        nn.init.zeros_(self.W)
        nn.init.constant_(self.a, 0.01)
        if not self.b.is_meta:
            with torch.no_grad():
                self.b.copy_(torch.cat(self.start()))

    def start(self) -> tuple[Tensor, Tensor, Tensor]:
        """Where the logits of H_pre, H_post and H_res begin."""
        raise NotImplementedError

    def read(self, R: Tensor) -> tuple[Weighed, Tensor]:
        """((H_res R, H_post), N(H_pre R))."""
        H_pre, H_post, H_res = self.connections(R)
        return (mix_rows(H_res, R), H_post), self.norm(weigh_rows(H_pre, R))

    def logits(self, R: Tensor) -> tuple[Tensor, ...]:
        """a W z + b for H_pre, H_post and H_res, z the rows in one vector brought to rms 1."""
        n, outputs = self.rate, self.W.shape[0] - 2 * self.rate
        sizes = [n, n, outputs]
        parts = zip(project_rows(R, self.W, self.norm_eps).split(sizes, -1), self.b.split(sizes), strict=True)
        return tuple(a * m + b for a, (m, b) in zip(self.a, parts, strict=True))

    def connections(self, R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """H_pre (..., n), H_post (..., n) and H_res (..., n, n)."""
        raise NotImplementedError

    def weights(self, rows: Tensor) -> Tensor:
        """H_pre."""
        return self.connections(rows)[0]


class SinkhornLink(ManifoldLink):
    """mHC by Sinkhorn's rounds."""

    equation = "h = H_pre R;  R = H_res R + H_post^T F(N h),  H_res doubly stochastic by Sinkhorn's rounds"

    def __init__(self, norm: nn.Module, dim: int, index: int, eps: float, options: ManifoldOptions) -> None:
        self.rounds, self.eps = options.sinkhorn_steps, options.eps
        super().__init__(norm, dim, options.rate, options.rate**2, index, eps)

    def start(self) -> tuple[Tensor, Tensor, Tensor]:
        """H_pre sums to 1, H_post = 1, H_res close to I: equal to Pre-Norm while all rows are equal.

        Each sublayer favours one row, in turn: read alike, equal rows would get equal gradients and stay equal.
        """
        n, device = self.rate, self.b.device
        pre = torch.full((n,), (1 - FAVOURED) / (n - 1), device=device, dtype=torch.float64)
        pre[self.index % n] = FAVOURED
        res = 5 * (torch.eye(n, device=device, dtype=torch.float64) - 1)
        return torch.logit(pre), torch.zeros_like(pre), res.flatten()

    def connections(self, R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """H_pre in (0, 1), H_post in (0, 2), H_res doubly stochastic: what Sinkhorn makes, transposed."""
        pre, post, res = self.logits(R)
        H_res = sinkhorn(res, self.rounds, self.eps).transpose(-1, -2)
        return torch.sigmoid(pre) + self.eps, 2 * torch.sigmoid(post), H_res


@dataclass(frozen=True)
class ManifoldOptions(Options):
    """Rate, projection and end."""

    rate: int = option(4, "n, the number of rows", low=2, high=64)
    sinkhorn_steps: int = option(20, "rounds of column and row normalisation of H_res", low=1, high=1000)
    collapse: Literal["mean", "learned"] = option(
        "mean", "how the rows become one at the end: mean (GLM-5-next) or learned, token by token (DeepSeek-V4)"
    )
    eps: float = option(1e-6, "added to H_pre and in every round of H_res", low=0, high=1)


class LearnedCollapse(nn.Module):
    """sum_j (sigmoid(a m + b)_j + eps) R_j with m = W vec(R) / rms(vec R): rows made one, token by token."""

    def __init__(self, dim: int, rate: int, eps: float, norm_eps: float, std: float, a: float, b: float) -> None:
        super().__init__()
        self.eps, self.norm_eps = eps, norm_eps
        self.first = (std, a, b)
        self.W = nn.Parameter(torch.empty(rate, rate * dim))
        self.b = nn.Parameter(torch.empty(rate))
        self.a = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def no_weight_decay(self) -> set[str]:
        """Bias and scale: their start is the meaning."""
        return {"a", "b"}

    def width_sums(self) -> set[str]:
        """W."""
        return {"W"}

    def reset_parameters(self) -> None:
        """Equal weights at first, as far as W is small."""
        std, a, b = self.first
        nn.init.normal_(self.W, std=std) if std else nn.init.zeros_(self.W)
        nn.init.constant_(self.a, a)
        nn.init.constant_(self.b, b)

    def weights(self, R: Tensor) -> Tensor:
        """(..., n)."""
        return torch.sigmoid(self.a * project_rows(R, self.W, self.norm_eps) + self.b) + self.eps

    def forward(self, R: Tensor) -> Tensor:
        """(..., n, d) to (..., d)."""
        return weigh_rows(self.weights(R), R)


class Manifold(Rows):
    """Manifold-constrained Hyper-Connections (arXiv 2512.24880)."""

    name = "mhc"
    about = """
    Manifold-constrained Hyper-Connections, as DeepSeek-V4 and GLM-5-next run them. arXiv 2512.24880.

    ``R = H_res R + H_post^T F(N(H_pre R))``, H_pre a sigmoid, H_post twice a sigmoid, H_res doubly stochastic. The
    token-dependent weights start at zero, so that the start is exactly Pre-Norm, and H_pre uneven, so that the rows
    come apart [both our choice].
    """
    equation = "R = H_res R + H_post^T F(N(H_pre R)),  H_res doubly stochastic"
    end = "N(mean or learned sum of rows)"
    arxiv = "2512.24880"
    options_class = ManifoldOptions
    options: ManifoldOptions
    drawing = """
 R (n rows) ──┬──▶ H_res R ──────────────────────────(+)──▶ R
              └──▶ H_pre R ──▶ N ──▶ F ──▶ ⊗ H_post ───┘

 start: n copies of embed        end: N(collapse of rows)
 H_pre = σ(·)   H_post = 2σ(·)   H_res = Sinkhorn(softmax(·))^T, all from the token's own rows"""

    def setup(self) -> None:
        """The learned collapse, if there is one."""
        learned, n = self.options.collapse == "learned", self.options.rate
        collapse = LearnedCollapse(self.dim, n, self.options.eps, self.norms.eps, 0.0, 0.01, 0.0) if learned else None
        self.collapse = collapse

    def link(self, place: Place) -> Link:
        """One set of mappings per sublayer, its favoured row in turn."""
        return SinkhornLink(self.norm("input"), self.dim, place.index, self.norms.eps, self.options)

    def close(self, streams: Tensor) -> Tensor:
        """N of the collapsed rows."""
        return super().close(streams.mean(-2) if self.collapse is None else self.collapse(streams))

    def end_weights(self, rows: Tensor) -> Tensor:
        """The mean's, or the token's own."""
        return super().end_weights(rows) if self.collapse is None else self.collapse.weights(rows)


class PermutationLink(ManifoldLink):
    """mHC-lite."""

    equation = "h = H_pre R;  R = H_res R + H_post^T F(N h),  H_res a mean of permutations"

    def __init__(self, norm: nn.Module, dim: int, index: int, eps: float, rate: int) -> None:
        super().__init__(norm, dim, rate, math.factorial(rate), index, eps)
        self.orders = tuple(itertools.permutations(range(rate)))  # the identity first

    def start(self) -> tuple[Tensor, Tensor, Tensor]:
        """H_pre favours row k mod n, H_post = 1, H_res nearly the identity, which comes first."""
        n, device = self.rate, self.b.device
        pre = torch.full((n,), -1.0, device=device)
        pre[self.index % n] = 1.0
        res = torch.full((math.factorial(n),), -8.0, device=device)
        res[0] = 0.0
        return pre, torch.zeros_like(pre), res

    def connections(self, R: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """H_pre in (0, 1), H_post in (0, 2), H_res = sum_r p_r P_r, doubly stochastic exactly."""
        pre, post, res = self.logits(R)
        shares = res.softmax(-1)
        H_res = (shares @ permutation_matrices(self.orders, shares)).unflatten(-1, (self.rate, self.rate))
        return torch.sigmoid(pre), 2 * torch.sigmoid(post), H_res


def permutation_matrices(orders: tuple[tuple[int, ...], ...], beside: Tensor) -> Tensor:
    """The matrix of each order of n rows, flat: (orders, n²), on the device and in the dtype of a tensor."""
    rows = torch.tensor(orders, device=beside.device)
    # No one_hot: it looks at the values, which tracers refuse and a GPU waits for.
    return (rows.unsqueeze(-1) == torch.arange(rows.shape[-1], device=beside.device)).to(beside.dtype).flatten(1)


@dataclass(frozen=True)
class LiteOptions(Options):
    """The rate."""

    rate: int = option(4, "n, the number of rows; there are n! permutations", low=2, high=5)


class ManifoldLite(Rows):
    """mHC-lite (arXiv 2601.05732)."""

    name = "mhc_lite"
    about = """
    mHC-lite: mHC whose H_res is a mean of all n! permutations, weighed by a softmax. arXiv 2601.05732.
    """
    equation = "R = H_res R + H_post^T F(N(H_pre R)),  H_res = sum_r softmax_r(·) P_r"
    end = "N(mean of rows)"
    arxiv = "2601.05732"
    options_class = LiteOptions
    options: LiteOptions
    drawing = """
 R (n rows) ──┬──▶ H_res R ──────────────────────────(+)──▶ R
              └──▶ H_pre R ──▶ N ──▶ F ──▶ ⊗ H_post ───┘

 start: n copies of embed        end: N(mean of rows)
 H_pre = σ(·)   H_post = 2σ(·)   H_res = Σ softmax(·) · permutations, all from the token's own rows"""

    def link(self, place: Place) -> Link:
        """One set of mappings per sublayer, its favoured row in turn."""
        return PermutationLink(self.norm("input"), self.dim, place.index, self.norms.eps, self.options.rate)

    def close(self, streams: Tensor) -> Tensor:
        """N of the mean of rows."""
        return super().close(streams.mean(-2))
