"""What a diffusion Transformer costs per image, before it is made, counted on the meta device."""

from __future__ import annotations

import torch

from siamesenorm.models.counts import Counts, counts_of
from siamesenorm.models.dit.config import DiTConfig
from siamesenorm.models.dit.model import DiT


def count_dit(config: DiTConfig) -> Counts:
    """Count a configuration's model; the unit is an image seen once."""
    with torch.device("meta"):
        model = DiT(config)
    kept = activations_of_dit(config, model.residual.kept)
    return counts_of(model, flops=flops_of_dit(config), length=config.tokens, activations=kept)


def flops_of_dit(config: DiTConfig) -> float:
    """Matrix products of a forward pass, a product and a sum being two; conditions are projected once an image."""
    c = config
    stack = c.blocks * (2 * c.tokens * (4 * c.dim**2 + 2 * c.dim * c.ffn_dim) + 4 * c.tokens**2 * c.dim)
    conditions = 2 * c.dim**2 * (6 * c.blocks + 2)
    patches = 2 * c.tokens * c.dim * c.patch_size**2 * (c.channels + c.out_channels)
    return float(stack + conditions + patches)


def activations_of_dit(config: DiTConfig, kept: float) -> int:
    """Numbers kept: as in a vision Transformer, with what a sublayer gave and its modulated reading beside."""
    c = config
    return c.tokens * (c.blocks * (int((8 + 2 * kept) * c.dim) + 2 * c.ffn_dim) + 2 * c.dim)
