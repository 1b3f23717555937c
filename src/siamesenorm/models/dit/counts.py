"""What a diffusion Transformer costs per image, before it is made, counted on the meta device."""

from __future__ import annotations

from typing import cast

import torch
from torch import Tensor

from siamesenorm.models.counts import Counts, counted_once, counts_of, flops_per_token, kept_by_links, kept_in_sublayers
from siamesenorm.models.dit.config import DiTConfig
from siamesenorm.models.dit.model import DiT, DiTBlock
from siamesenorm.models.stack import Block


@counted_once
def count_dit(config: DiTConfig) -> Counts:
    """Count a configuration's model; the unit is an image seen once."""
    with torch.device("meta"):
        model = DiT(config)
    return counts_of(
        model, flops=flops_of_dit(config), length=config.tokens, activations=lambda: activations_of_dit(model)
    )


def flops_of_dit(config: DiTConfig) -> float:
    """Matrix products of a forward pass; conditions are projected once an image."""
    c = config
    weights = c.blocks * (4 * c.dim**2 + 2 * c.dim * c.ffn_dim)
    stack = c.tokens * flops_per_token(weights, blocks=c.blocks, width=c.dim, seen=c.tokens)
    conditions = 2 * c.dim**2 * (6 * c.blocks + 2)
    patches = 2 * c.tokens * c.dim * c.patch_size**2 * (c.channels + c.out_channels)
    return float(stack + conditions + patches)


def activations_of_dit(model: DiT) -> int:
    """Numbers kept by links, in sublayers, and of the conditions of all blocks; the model is as in `count_vit`."""
    c = model.config

    def inputs(block: Block, rows: int) -> tuple[Tensor, tuple[Tensor, ...]]:
        modulation = cast(DiTBlock, block).modulation
        return torch.empty(rows, c.tokens, c.dim), modulation(torch.empty(rows, c.dim))

    links = kept_by_links(c.topology, c.blocks, model.residual.norms, c.dim, gated=True)
    conditions = c.blocks * (1 + 6)  # what a projection reads, and its six parts
    head = c.tokens  # behind the last norm, what is modulated for the head
    return int(c.tokens * links + c.dim * (conditions + head) + kept_in_sublayers(model, inputs))
