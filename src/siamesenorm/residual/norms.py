"""Norms: RMSNorm and LayerNorm, with or without affine, and how a stack's norms are chosen by role."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from siamesenorm.residual.errors import TopologyError, shown
from siamesenorm.residual.kernels.layer_norm import layer_norm
from siamesenorm.residual.kernels.rms_norm import rms_norm

NormKind = Literal["rms", "layer"]
NormRole = Literal["input", "stream", "final"]


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


NORM_CLASSES: dict[str, type[Norm]] = {"rms": RMSNorm, "layer": LayerNorm}


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
