"""The FFN: SwiGLU (arXiv 2002.05202) or GELU, exact or by tanh."""

from __future__ import annotations

from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.autograd.function import once_differentiable

from siamesenorm.layers import native
from siamesenorm.layers.attention import RoleWeights
from siamesenorm.layers.linear import Linear
from siamesenorm.residual.base import SublayerNeeds
from siamesenorm.residual.norms import NormFactory, runs_plain_eager

Activation = Literal["swiglu", "gelu"]


def swiglu(projected: Tensor) -> Tensor:
    """``silu(gate) * value`` of one projection, whose halves are (value, gate)."""
    if runs_plain_eager(projected):
        return _SwiGLU.apply(projected) if torch.is_grad_enabled() else _swiglu(projected)
    value, gate = projected.chunk(2, dim=-1)
    return F.silu(gate) * value


def _swiglu(projected: Tensor) -> Tensor:
    if native.swiglu_usable(projected):
        return native.swiglu(projected)
    value, gate = projected.chunk(2, dim=-1)
    return F.silu(gate).mul_(value)


class _SwiGLU(torch.autograd.Function):
    """Keeps the projection alone; autograd would also keep silu(gate)."""

    @staticmethod
    def forward(ctx: Any, projected: Tensor) -> Tensor:
        ctx.save_for_backward(projected)
        return _swiglu(projected)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        (projected,) = ctx.saved_tensors
        if native.swiglu_usable(projected, grad):
            return native.swiglu_backward(grad.contiguous(), projected)
        value, gate = projected.chunk(2, dim=-1)
        out = torch.empty_like(projected)
        grad_value, grad_gate = out.chunk(2, dim=-1)
        torch.mul(grad, F.silu(gate), out=grad_value)
        torch.ops.aten.silu_backward.grad_input(grad * value, gate, grad_input=grad_gate)
        return out


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
