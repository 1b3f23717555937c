"""What a vision Transformer costs per image, before it is made, counted on the meta device."""

from __future__ import annotations

import torch

from siamesenorm.layers.mlp import GATED
from siamesenorm.models.counts import Counts, counts_of, flops_per_token, kept_by_ffn, kept_by_links, kept_per_token
from siamesenorm.models.vit.config import ViTConfig
from siamesenorm.models.vit.model import VisionTransformer


def count_vit(config: ViTConfig) -> Counts:
    """Count a configuration's model; the unit is an image."""
    with torch.device("meta"):
        model = VisionTransformer(config)
    kept = activations_of_image(config, kept_by_links(config.topology, config.blocks, model.residual.norms))
    return counts_of(model, flops=flops_of_image(config), length=config.tokens, activations=kept)


def flops_of_image(config: ViTConfig) -> float:
    """Matrix products of a forward pass; every token sees every other."""
    c, up = config, 2 if config.activation in GATED else 1
    weights = c.blocks * (4 * c.dim**2 + (1 + up) * c.dim * c.ffn_dim)
    stack = c.tokens * flops_per_token(weights, blocks=c.blocks, width=c.dim, seen=c.tokens)
    patches = (c.tokens - c.prefix_tokens) * c.channels * c.patch_size**2
    read = {"token": c.prefix_tokens, "avg": 1, "none": c.tokens}[c.pool]
    return float(stack + 2 * c.dim * (patches + read * c.classes))


def activations_of_image(config: ViTConfig, links: float) -> int:
    """Numbers kept by links, and in sublayers: q, k, v, attention's output, the FFN's inner."""
    c, inner = config, kept_by_ffn(config.ffn_dim, config.activation)
    return c.tokens * kept_per_token(blocks=c.blocks, dim=c.dim, links=links, attention=4 * c.dim, ffn=inner)
