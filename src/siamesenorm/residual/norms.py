"""Norms: RMSNorm, LayerNorm and GatedNorm, with or without affine, and how a stack's norms are chosen by role."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from siamesenorm.errors import TopologyError, shown
from siamesenorm.residual.kernels.layer_norm import layer_norm
from siamesenorm.residual.kernels.rms_norm import rms_norm
from siamesenorm.residual.precision import widened

NormKind = Literal["rms", "layer", "gated"]
NormRole = Literal["input", "stream", "final"]
GATE_RANK = 16
"""Rank of a GatedNorm's gates [our choice; not published]."""


class Norm(nn.Module):
    """One norm over the last dimension, with its own gain (and, for LayerNorm, bias)."""

    kind: NormKind

    def __init__(self, dim: int, eps: float = 1e-5, affine: bool = True, bias: bool = False) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps
        self.weight = nn.Parameter(torch.empty(dim)) if affine else None
        self.bias = nn.Parameter(torch.empty(dim)) if affine and bias else None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Gain 1, bias 0."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def check_width(self, x: Tensor) -> None:
        """Raise where the last dimension is not the one that is normalised."""
        if x.shape[-1] != self.dim:
            raise ValueError(f"norm: {x.shape[-1]} features where {self.dim} are normalised")

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"{self.dim}, eps={self.eps}, affine={self.weight is not None}, bias={self.bias is not None}"


class RMSNorm(Norm):
    """x / sqrt(mean(x^2) + eps) * weight."""

    kind: NormKind = "rms"

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension; float32 inside for low-precision input."""
        self.check_width(x)
        return rms_norm(x, self.weight, self.bias, self.eps)


class LayerNorm(Norm):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias."""

    kind: NormKind = "layer"

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension; float32 inside for low-precision input."""
        self.check_width(x)
        return layer_norm(x, (self.dim,), self.weight, self.bias, self.eps)


class GatedNorm(RMSNorm):
    """n * sigmoid(W_2 silu(W_1 n)) with n = RMSNorm(x): every feature gated by all of them. arXiv 2601.22966."""

    kind: NormKind = "gated"

    def __init__(
        self, dim: int, eps: float = 1e-5, affine: bool = True, bias: bool = False, rank: int = GATE_RANK
    ) -> None:
        self.rank = rank
        super().__init__(dim, eps, affine, bias)

    def width_sums(self) -> set[str]:
        """W_1."""
        return {"W_1"}

    def reset_parameters(self) -> None:
        """Gain 1, bias 0; W_1 ~ N(0, .02) and W_2 = 0, so that every gate starts at one half [our choice]."""
        if not hasattr(self, "W_1"):
            self.W_1 = nn.Parameter(torch.empty(self.rank, self.dim))
            self.W_2 = nn.Parameter(torch.empty(self.dim, self.rank))
        super().reset_parameters()
        nn.init.normal_(self.W_1, std=0.02)
        nn.init.zeros_(self.W_2)

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension, and gate it; the gates are computed in float32 at least."""
        normed = super().forward(x)
        low = F.silu(F.linear(normed, self.W_1.to(normed.dtype)))
        return normed * torch.sigmoid(widened(F.linear(low, self.W_2.to(low.dtype)))).to(normed.dtype)


def inverse_rms(x: Tensor, eps: float) -> Tensor:
    """1 / sqrt(mean(x^2) + eps) of the last dimension, which stays as one of 1."""
    return torch.rsqrt(torch.linalg.vecdot(x, x).unsqueeze(-1) / x.shape[-1] + eps)


NORM_CLASSES: dict[str, type[Norm]] = {"rms": RMSNorm, "layer": LayerNorm, "gated": GatedNorm}


@dataclass(frozen=True)
class NormSpec:
    """How to make a norm. ``bias=None`` means what is usual: with LayerNorm, without for RMSNorm."""

    kind: NormKind = "rms"
    eps: float = 1e-5
    affine: bool = True
    bias: bool | None = None

    def __post_init__(self) -> None:
        if self.kind not in NORM_CLASSES:
            raise TopologyError(f"norm: unknown kind {shown(self.kind)}; known kinds: {', '.join(NORM_CLASSES)}")

    def __call__(self, dim: int) -> Norm:
        """A fresh norm of width `dim`."""
        bias = self.kind == "layer" if self.bias is None else self.bias
        return NORM_CLASSES[self.kind](dim, eps=self.eps, affine=self.affine, bias=bias)

    @property
    def ungated(self) -> NormSpec:
        """The same without gates: what norms inside sublayers are made by."""
        return replace(self, kind="rms") if self.kind == "gated" else self


NormFactory = Callable[[int], nn.Module]
NormLike = str | NormFactory


@dataclass(frozen=True)
class Norms:
    """Norm factories by role.

    ``input``: the last norm before a sublayer; conditioned models (adaLN) modulate its output, so they want
    it without affine. ``stream``: a norm on a residual stream. ``final``: the last norm of the stack.
    """

    stream: NormFactory
    input: NormFactory
    final: NormFactory

    @property
    def eps(self) -> float:
        """What norms without a gain, of a topology's own, add to the mean square: as the others do, where they say."""
        return float(getattr(self.stream, "eps", 1e-5))

    @property
    def inside(self) -> NormFactory:
        """What makes norms inside sublayers."""
        return getattr(self.stream, "ungated", self.stream)

    @classmethod
    def of(cls, norm: NormLike | Norms) -> Norms:
        """From a kind ("rms", "layer"), one factory for all roles, or a ready `Norms`."""
        if isinstance(norm, Norms):
            return norm
        if isinstance(norm, str):
            norm = NormSpec(norm)  # type: ignore[arg-type]  # NormSpec names the allowed kinds itself
        if not callable(norm):
            raise TopologyError(
                f"norm: {shown(norm)} is neither one of {', '.join(NORM_CLASSES)} nor a function from width to module"
            )
        return cls(stream=norm, input=norm, final=norm)
