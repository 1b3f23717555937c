"""What a vision Transformer costs per image, before it is made, counted on the meta device."""

from __future__ import annotations

import torch

from siamesenorm.models.counts import Counts, counts_of
from siamesenorm.models.vit.config import ViTConfig
from siamesenorm.models.vit.model import VisionTransformer


def count_vit(config: ViTConfig) -> Counts:
    """Count a configuration's model; the unit is an image."""
    with torch.device("meta"):
        model = VisionTransformer(config)
    kept = activations_of_image(config, model.residual.kept)
    return counts_of(model, flops=flops_of_image(config), length=config.tokens, activations=kept)


def flops_of_image(config: ViTConfig) -> float:
    """Matrix products of a forward pass, a product and a sum being two; every token sees every other."""
    c, up = config, 2 if config.activation == "swiglu" else 1
    weights = 4 * c.dim**2 + (1 + up) * c.dim * c.ffn_dim
    stack = c.blocks * (2 * c.tokens * weights + 4 * c.tokens**2 * c.dim)
    patches = (c.tokens - c.prefix_tokens) * c.channels * c.patch_size**2
    read = {"token": c.prefix_tokens, "avg": 1, "none": c.tokens}[c.pool]
    return float(stack + 2 * c.dim * (patches + read * c.classes))


def activations_of_image(config: ViTConfig, kept: float) -> int:
    """Numbers kept: what links keep, q, k, v, attention's output, the FFN's inner."""
    c = config
    inner = (3 if c.activation == "swiglu" else 2) * c.ffn_dim
    return c.tokens * (c.blocks * (int((4 + 2 * kept) * c.dim) + inner) + 2 * c.dim)
