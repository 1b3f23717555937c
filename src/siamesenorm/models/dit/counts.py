"""What a diffusion Transformer costs per image, before it is made, counted on the meta device."""

from __future__ import annotations

import torch

from siamesenorm.models.counts import Counts, counts_of, flops_per_token, kept_by_links, kept_per_token
from siamesenorm.models.dit.config import DiTConfig
from siamesenorm.models.dit.model import DiT


def count_dit(config: DiTConfig) -> Counts:
    """Count a configuration's model; the unit is an image seen once."""
    with torch.device("meta"):
        model = DiT(config)
    kept = activations_of_dit(config, kept_by_links(config.topology, config.blocks, model.residual.norms))
    return counts_of(model, flops=flops_of_dit(config), length=config.tokens, activations=kept)


def flops_of_dit(config: DiTConfig) -> float:
    """Matrix products of a forward pass; conditions are projected once an image."""
    c = config
    weights = c.blocks * (4 * c.dim**2 + 2 * c.dim * c.ffn_dim)
    stack = c.tokens * flops_per_token(weights, blocks=c.blocks, width=c.dim, seen=c.tokens)
    conditions = 2 * c.dim**2 * (6 * c.blocks + 2)
    patches = 2 * c.tokens * c.dim * c.patch_size**2 * (c.channels + c.out_channels)
    return float(stack + conditions + patches)


def activations_of_dit(config: DiTConfig, links: float) -> int:
    """Numbers kept: as in a vision Transformer, with what a sublayer gave and its modulated reading beside."""
    c, beside = config, 2 * config.dim
    return c.tokens * kept_per_token(
        blocks=c.blocks, dim=c.dim, links=links, attention=4 * c.dim + beside, ffn=2 * c.ffn_dim + beside
    )
