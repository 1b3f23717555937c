"""What a vision Transformer costs per image, before it is made, counted on the meta device."""

from __future__ import annotations

import torch
from torch import Tensor

from siamesenorm.layers.mlp import GATED
from siamesenorm.models.counts import Counts, counted_once, counts_of, flops_per_token, kept_by_links, kept_in_sublayers
from siamesenorm.models.stack import Block
from siamesenorm.models.vit.config import ViTConfig
from siamesenorm.models.vit.model import VisionTransformer


@counted_once
def count_vit(config: ViTConfig) -> Counts:
    """Count a configuration's model; the unit is an image."""
    with torch.device("meta"):
        model = VisionTransformer(config)
    return counts_of(
        model, flops=flops_of_image(config), length=config.tokens, activations=lambda: activations_of_image(model)
    )


def flops_of_image(config: ViTConfig) -> float:
    """Matrix products of a forward pass; every token sees every other."""
    c, up = config, 2 if config.activation in GATED else 1
    weights = c.blocks * (4 * c.dim**2 + (1 + up) * c.dim * c.ffn_dim)
    stack = c.tokens * flops_per_token(weights, blocks=c.blocks, width=c.dim, seen=c.tokens)
    patches = (c.tokens - c.prefix_tokens) * c.channels * c.patch_size**2
    read = {"token": c.prefix_tokens, "avg": 1, "none": c.tokens}[c.pool]
    return float(stack + 2 * c.dim * (patches + read * c.classes))


def activations_of_image(model: VisionTransformer) -> int:
    """Numbers kept by links, and in sublayers; the model lies on the meta device and is changed."""
    c = model.config

    def inputs(block: Block, rows: int) -> tuple[Tensor, None]:
        return torch.empty(rows, c.tokens, c.dim), None

    links = kept_by_links(c.topology, c.blocks, model.residual.norms, c.dim)
    return int(c.tokens * links + kept_in_sublayers(model, inputs))
