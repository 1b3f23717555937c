"""Streams of one process that has some of the tokens, in a model without values: gathered and scattered by shape.

What `siamesenorm.train.sequence_parallel` does between processes, of which there is one here.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from siamesenorm.models.lm import LanguageModel


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
