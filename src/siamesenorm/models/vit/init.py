"""First weights of a vision Transformer, as DeiT's (arXiv 2012.12877).

Projections, heads, tokens and positions are normal with std .02 (`init_std`; the official cut at ±2 is a hundred of
them away), biases 0; the patch embedding is uniform within ±1/sqrt(fan_in), weight and bias, as a convolution's.
The topology's `InitRule` comes on top, as in language models: one std for all where its authors fix it and a factor
by role. There is no depth factor to keep or replace.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from siamesenorm.layers.attention import RoleWeights
from siamesenorm.models.stack import Block

if TYPE_CHECKING:
    from siamesenorm.models.vit.model import VisionTransformer


@torch.no_grad()
def init_vit(model: VisionTransformer, seed: int | None = None) -> None:
    """Give every parameter its first value. The draws do not depend on the topology, only their size does."""
    generator = None if seed is None else torch.Generator(model.pos_embed.device).manual_seed(seed)
    rule, std = model.residual.init_rule, model.config.init_std
    for module in model.modules():
        if isinstance(module, nn.Linear):
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif not isinstance(module, nn.Conv2d):
            reset: Callable[[], None] = getattr(module, "reset_parameters", lambda: None)
            reset()  # norms, links, and what a topology holds itself

    patch = model.patch_embed.proj
    limit = patch.weight[0].numel() ** -0.5
    for parameter in patch.parameters():
        parameter.uniform_(-limit, limit, generator=generator)
    for token in (model.cls_token, model.dist_token, model.pos_embed):
        if token is not None:
            token.normal_(0, rule.std or std, generator=generator)
    for block in model.blocks:
        for sublayer in cast(Block, block).sublayers:
            for role, weight in cast(Callable[[], RoleWeights], sublayer.role_weights)():
                weight.normal_(0, (rule.std or std) * rule.scale.get(role, 1.0), generator=generator)
    for head in model.heads():
        init_head(head, std, generator)


@torch.no_grad()
def init_head(head: nn.Linear, std: float, generator: torch.Generator | None = None) -> None:
    """First values of a classifier."""
    weight: Tensor = head.weight
    weight.normal_(0, std, generator=generator)
    nn.init.zeros_(head.bias)
