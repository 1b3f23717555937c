"""What a language model costs per token, before it is made, counted on the meta device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from siamesenorm.models.counts import (
    Counts,
    counted_once,
    counts_of,
    flops_per_token,
    kept_by_links,
    kept_in_sublayers,
    size_of_sublayers,
)
from siamesenorm.models.lm.config import LMConfig
from siamesenorm.models.lm.model import LanguageModel
from siamesenorm.models.stack import Block

SEEN_TOKENS = 16
"""Of a row on which it is seen what sublayers keep."""


@counted_once
def count_lm(config: LMConfig, *, length: int | None = None) -> Counts:
    """Count a configuration's model at sequence length `length` (default: its longest); the unit is a token."""
    length = length or config.max_length
    with torch.device("meta"):
        model = LanguageModel(config)
    flops, idle = flops_of_token(model, length), idle_parameters(model)
    return counts_of(model, flops=flops, length=length, activations=lambda: kept_of_token(model), idle=idle)


def kept_of_token(model: LanguageModel) -> float:
    """Numbers of a token kept by links, and in sublayers; the model lies on the meta device and is changed."""
    c = model.config
    tokens = min(SEEN_TOKENS, c.max_length)

    def inputs(block: Block, rows: int) -> tuple[Tensor, Any]:
        return torch.empty(rows, tokens, c.dim), model.context(torch.zeros(rows, tokens, dtype=torch.long))

    links = kept_by_links(c.topology, c.blocks, model.residual.norms, c.dim)
    return links + kept_in_sublayers(model, inputs) / tokens


def idle_parameters(model: LanguageModel) -> int:
    """Parameters of the experts that a token is not sent to."""
    config = model.config
    if config.moe is None:
        return 0
    experts: list[nn.Module] = [block.ffn for block in model.blocks]  # type: ignore[misc]
    stacked = sum(p.numel() for moe in experts for p in moe.parameters(recurse=False))
    return stacked * (config.moe.experts - config.moe.top_k) // config.moe.experts


def flops_of_token(model: LanguageModel, length: int) -> float:
    """Forward, of a token that sees half of a sequence, or its window; idle experts do not count."""
    c, seen = model.config, (length + 1) / 2
    if c.window is not None and c.window < length:
        windowed = sum(map(c.is_windowed, range(c.blocks))) / c.blocks
        seen = windowed * (c.window - c.window * (c.window - 1) / (2 * length)) + (1 - windowed) * seen
    weights = size_of_sublayers(model) - idle_parameters(model) + c.vocab_size * c.dim
    return flops_per_token(weights, blocks=c.blocks, width=c.heads * c.dim_per_head, seen=seen)
