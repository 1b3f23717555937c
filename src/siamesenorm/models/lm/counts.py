"""What a language model costs per token, before it is made, counted on the meta device."""

from __future__ import annotations

import torch
from torch import nn

from siamesenorm.models.counts import Counts, counts_of, size_of_sublayers
from siamesenorm.models.lm.config import LMConfig
from siamesenorm.models.lm.model import LanguageModel


def count_lm(config: LMConfig, *, length: int | None = None) -> Counts:
    """Count a configuration's model at sequence length `length` (default: its longest); the unit is a token."""
    length = length or config.max_length
    with torch.device("meta"):
        model = LanguageModel(config)
    idle = idle_parameters(model)
    flops = flops_of_token(config, size_of_sublayers(model) - idle, length)
    return counts_of(
        model, flops=flops, length=length, activations=activations_of_token(config, model.residual.kept), idle=idle
    )


def idle_parameters(model: LanguageModel) -> int:
    """Parameters of the experts that a token is not sent to."""
    config = model.config
    if config.moe is None:
        return 0
    experts: list[nn.Module] = [block.ffn for block in model.blocks]  # type: ignore[misc]
    stacked = sum(p.numel() for moe in experts for p in moe.parameters(recurse=False))
    return stacked * (config.moe.experts - config.moe.top_k) // config.moe.experts


def flops_of_token(config: LMConfig, sublayer_parameters: int, length: int) -> float:
    """Two per weight and token, the head included; attention's two products over what a token sees on average."""
    seen = (length + 1) / 2
    if config.window is not None and config.window < length:
        seen = config.window - config.window * (config.window - 1) / (2 * length)
    attention = 4 * config.blocks * config.heads * config.head_width * seen
    return 2 * (sublayer_parameters + config.vocab_size * config.dim) + attention


def activations_of_token(config: LMConfig, kept: float = 2.0) -> int:
    """Numbers kept per token: what links keep (`Topology.kept`), q, k, v, attention's output, the FFN's inner."""
    inner = config.heads * config.head_width
    qkv = inner + 2 * config.key_heads * config.head_width
    hidden = config.ffn_dim if config.moe is None else config.moe.top_k * config.moe.expert_dim
    ffn = (3 if config.activation == "swiglu" else 2) * hidden
    return config.blocks * (int(2 * kept * config.dim) + qkv + inner + ffn) + 2 * config.dim
