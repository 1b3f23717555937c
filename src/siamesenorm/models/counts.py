"""What a model costs, before it is made: parameters, FLOPs and memory, counted on the meta device."""

from __future__ import annotations

from dataclasses import asdict, dataclass

import torch
from torch import nn

from siamesenorm.models.lm import LanguageModel
from siamesenorm.models.lm_config import LMConfig

FLOAT32 = 4


@dataclass(frozen=True)
class Counts:
    """Costs of one model; bytes are those of float32 training. The unit of work is a token, or an image."""

    total: int
    """All parameters."""
    active: int
    """Parameters that one unit uses: all but the experts it is not sent to."""
    embedding: int
    """The embedding's parameters, and the head's where it is another."""
    topology: int
    """What the residual topology holds: norms on streams and inputs, gains, mixing weights."""
    topology_extra: int
    """How many more these are than Pre-Norm's."""
    flops_forward: float
    """Per unit, matrix products and attention (causal: over half of `length`), a product and a sum being two."""
    flops_training: float
    """Per unit, forward and backward."""
    length: int
    """Tokens of a sequence or an image, for attention's share."""
    weight_bytes: int
    """Weights alone."""
    optimizer_bytes: int
    """AdamW's two moments."""
    training_bytes: int
    """Weights, gradients and moments."""
    activation_bytes: int
    """Kept for backward per unit, an estimate for one stream or the fused siamese step."""

    def as_json(self) -> dict[str, int | float]:
        """Plain numbers by name."""
        return asdict(self)


def count(config: LMConfig, *, length: int | None = None) -> Counts:
    """Count a configuration's model at sequence length `length` (default: its longest)."""
    length = length or config.max_length
    with torch.device("meta"):
        model = LanguageModel(config)
        plain = LanguageModel(config.model_copy(update={"topology": "pre"}))
    embedding = model.embedding.weight.numel() + (0 if config.tied else model.head_weight.numel())
    active = size(model) - _idle(config, model)
    return summary(
        total=size(model),
        active=active,
        embedding=embedding,
        topology=size(model.residual),
        plain_topology=size(plain.residual),
        flops=flops_forward(config, active - size(model.residual) - embedding, length),
        length=length,
        activations=activations(config),
    )


def summary(
    *,
    total: int,
    active: int,
    embedding: int,
    topology: int,
    plain_topology: int,
    flops: float,
    length: int,
    activations: int,
) -> Counts:
    """Counts of a model from what was counted, with the bytes that follow from it."""
    return Counts(
        total=total,
        active=active,
        embedding=embedding,
        topology=topology,
        topology_extra=topology - plain_topology,
        flops_forward=flops,
        flops_training=3 * flops,
        length=length,
        weight_bytes=FLOAT32 * total,
        optimizer_bytes=2 * FLOAT32 * total,
        training_bytes=4 * FLOAT32 * total,
        activation_bytes=FLOAT32 * activations,
    )


def size(module: nn.Module) -> int:
    """All parameters of a module."""
    return sum(p.numel() for p in module.parameters())


def _idle(config: LMConfig, model: LanguageModel) -> int:
    """Parameters of the experts that a token is not sent to."""
    if config.moe is None:
        return 0
    experts: list[nn.Module] = [block.ffn for block in model.blocks]  # type: ignore[misc]
    stacked = sum(p.numel() for moe in experts for p in moe.parameters(recurse=False))
    return stacked * (config.moe.experts - config.moe.top_k) // config.moe.experts


def flops_forward(config: LMConfig, sublayer_parameters: int, length: int) -> float:
    """Two per weight and token, the head included; attention's two products over what a token sees on average."""
    seen = (length + 1) / 2
    if config.window is not None and config.window < length:
        seen = config.window - config.window * (config.window - 1) / (2 * length)
    attention = 4 * config.blocks * config.heads * config.head_width * seen
    return 2 * (sublayer_parameters + config.vocab_size * config.dim) + attention


def activations(config: LMConfig) -> int:
    """Numbers kept per token: a stream and a reading per sublayer, q, k, v, attention's output, the FFN's inner."""
    inner = config.heads * config.head_width
    qkv = inner + 2 * config.key_heads * config.head_width
    hidden = config.ffn_dim if config.moe is None else config.moe.top_k * config.moe.expert_dim
    ffn = (3 if config.activation == "swiglu" else 2) * hidden
    return config.blocks * (4 * config.dim + qkv + inner + ffn) + 2 * config.dim
