"""Experts that tokens travel to, in a model without values: as many rows arrive as leave.

What `siamesenorm.train.expert_parallel` does between processes, of which there is one here. Routing that is balanced
sends every process as many rows as it has itself; routing that is not fills some processes more than is counted.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from siamesenorm.layers.grouped import add_slots, sort_slots, spread_slots
from siamesenorm.layers.moe import MoE, compute_dtype
from siamesenorm.train.expert_parallel import Exchange, experts_of


class _Travelled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor) -> Tensor:
        return torch.empty_like(rows)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return torch.empty_like(grad)


class PretendedExchange(Exchange):
    """An exchange of one process with others that have as much."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __call__(self, moe: MoE, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """`Exchange` with this process's own rows in place of the others'."""
        slots, order = sort_slots(chosen, moe.experts)
        rows = spread_slots(tokens.to(compute_dtype(tokens)), slots)
        expert = chosen.flatten().index_select(0, order)
        returned = _Travelled.apply(self.compute(moe, _Travelled.apply(rows), expert, moe.experts))
        weight = weights.flatten().index_select(0, order).unsqueeze(1)
        return add_slots((returned * weight).to(rows.dtype), slots)


def pretend_exchanged(model: nn.Module, size: int) -> None:
    """Let tokens of a model travel to its experts."""
    for moe in experts_of(model) if size > 1 else ():
        moe.run_experts = PretendedExchange(size)
