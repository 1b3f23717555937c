"""The FFN: SwiGLU or GEGLU (arXiv 2002.05202), or GELU, exact or by tanh."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from siamesenorm.layers.attention import RoleWeights
from siamesenorm.layers.kernels.swiglu import swiglu
from siamesenorm.layers.linear import Linear
from siamesenorm.residual.base import SublayerNeeds
from siamesenorm.residual.norms import NormFactory

Activation = Literal["swiglu", "gelu", "gelu_tanh", "geglu_tanh"]
GATED = ("swiglu", "geglu_tanh")
"""Activations of two projections, a value and a gate."""


def activate(projected: Tensor, activation: str) -> Tensor:
    """The hidden units of a projection."""
    if activation == "swiglu":
        return swiglu(projected)
    if activation == "geglu_tanh":
        value, gate = projected.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh") * value
    return F.gelu(projected, approximate="tanh" if activation == "gelu_tanh" else "none")


class MLP(nn.Module):
    """dim → hidden → dim. A gated one's value and gate are one projection of 2 × hidden rows, value first."""

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        needs: SublayerNeeds,
        norm: NormFactory,
        activation: Activation = "swiglu",
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.up = Linear(dim, 2 * hidden if activation in GATED else hidden, bias=bias)
        self.down = Linear(hidden, dim, bias=bias)
        self.out_norm = needs.inner("out", norm)(hidden) if needs.output_norm else None

    def forward(self, h: Tensor) -> Tensor:
        """(..., dim) to the same."""
        inner = activate(self.up(h), self.activation)
        return self.down(inner if self.out_norm is None else self.out_norm(inner))

    def role_weights(self) -> RoleWeights:
        """Weights by the role that init rules speak of."""
        yield "ffn_in", self.up.weight
        yield "ffn_out", self.down.weight

    def hidden_matrices(self) -> dict[str, int]:
        """Weights by name, and the rows of one matrix in each: SwiGLU's value and gate are two."""
        return {"up.weight": self.down.in_features, "down.weight": self.down.out_features}
