"""What processes send each other, in a model without values and in one process: rows arrive, as many as there are.

`PretendedExchange` stands for `siamesenorm.train.parallel.experts`: routing that is balanced sends every process as
many rows as it has itself; routing that is not fills some processes more than is counted. `pretend_divided` stands for
`siamesenorm.train.parallel.sequence`: streams of some of the tokens, gathered and scattered by shape.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from siamesenorm.layers.grouped import add_slots, sort_slots, spread_slots
from siamesenorm.layers.moe import MoE, compute_dtype
from siamesenorm.models.lm import LanguageModel
from siamesenorm.train.parallel.experts import Exchange, experts_of


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


class _Tokens(torch.autograd.Function):
    """As many tokens as asked for, whatever they are."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tokens: int) -> Tensor:
        ctx.tokens = x.shape[-2]
        return x.new_empty((*x.shape[:-2], tokens, x.shape[-1]))

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad.new_empty((*grad.shape[:-2], ctx.tokens, grad.shape[-1])), None


def pretend_divided(model: nn.Module, parts: int) -> None:
    """Let a language model carry a part of its tokens between sublayers."""
    if parts == 1 or not isinstance(model, LanguageModel):
        return

    def gather(x: Tensor) -> Tensor:
        return _Tokens.apply(x, x.shape[-2] * parts)

    def scatter(x: Tensor) -> Tensor:
        return _Tokens.apply(x, x.shape[-2] // parts)

    def scattered(module: nn.Module, inputs: Any, out: Any) -> Any:
        return (scatter(out[0]), *out[1:]) if isinstance(out, tuple) else scatter(out)

    for table in (model.embedding, model.positions):
        if table is not None:
            table.register_forward_hook(scattered)
    for block in model.blocks:
        for sublayer in block.sublayers:  # type: ignore[union-attr]  # ModuleList holds blocks
            sublayer.register_forward_pre_hook(lambda _, inputs: (gather(inputs[0]), *inputs[1:]))
            sublayer.register_forward_hook(scattered)
    close = model.residual.close
    model.residual.close = lambda streams: gather(close(streams))  # type: ignore[method-assign]
