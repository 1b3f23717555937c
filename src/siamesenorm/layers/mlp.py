"""The FFN: SwiGLU (arXiv 2002.05202) or GELU, exact or by tanh."""

from __future__ import annotations

from typing import Literal

import torch.nn.functional as F
from torch import Tensor, nn

from siamesenorm.layers.attention import RoleWeights
from siamesenorm.layers.kernels.swiglu import swiglu
from siamesenorm.layers.linear import Linear
from siamesenorm.residual.base import SublayerNeeds
from siamesenorm.residual.norms import NormFactory

Activation = Literal["swiglu", "gelu"]


class MLP(nn.Module):
    """dim → hidden → dim. SwiGLU's value and gate are one projection of 2 × hidden rows, value first."""

    def __init__(
        self,
        dim: int,
        hidden: int,
        *,
        needs: SublayerNeeds,
        norm: NormFactory,
        activation: Activation | Literal["gelu_tanh"] = "swiglu",
        bias: bool = False,
    ) -> None:
        super().__init__()
        self.activation = activation
        self.up = Linear(dim, 2 * hidden if activation == "swiglu" else hidden, bias=bias)
        self.down = Linear(hidden, dim, bias=bias)
        self.out_norm = norm(hidden) if needs.output_norm else None

    def forward(self, h: Tensor) -> Tensor:
        """(..., dim) to the same."""
        projected = self.up(h)
        if self.activation == "swiglu":
            inner = swiglu(projected)
        else:
            inner = F.gelu(projected, approximate="tanh" if self.activation == "gelu_tanh" else "none")
        return self.down(inner if self.out_norm is None else self.out_norm(inner))

    def role_weights(self) -> RoleWeights:
        """Weights by the role that init rules speak of."""
        yield "ffn_in", self.up.weight
        yield "ffn_out", self.down.weight

    def hidden_matrices(self) -> dict[str, int]:
        """Weights by name, and the rows of one matrix in each: SwiGLU's value and gate are two."""
        return {"up.weight": self.down.in_features, "down.weight": self.down.out_features}
