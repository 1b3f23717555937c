"""First weights of a diffusion Transformer.

| weights                                      | start                                        |
|----------------------------------------------|----------------------------------------------|
| projections of attention and FFN, patches    | uniform, std sqrt(2 / (fan_in + fan_out))    |
| embeddings of timestep and label             | normal, std .02                              |
| modulations, head                            | 0                                            |
| biases                                       | 0                                            |
| positions (not learnt)                       | sines and cosines of row and column          |

Queries, keys and values count as the one matrix that they lie in, as in the official code. The topology's `InitRule`
comes on top: one std for all where its authors fix it, and a factor by role. Gates that start closed take the place
of a depth factor. The head starts at 0, and with it the model's output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from siamesenorm.layers.sincos import grid_positions

if TYPE_CHECKING:
    from siamesenorm.models.dit.model import DiT, DiTBlock

EMBEDDING_STD = 0.02


@torch.no_grad()
def init_dit(model: DiT, seed: int | None = None) -> None:
    """Give every parameter its first value. The draws do not depend on the topology, only their size does."""
    device = model.head.weight.device
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    for module in model.modules():
        if isinstance(module, (nn.Linear, nn.Conv2d)):
            if module.bias is not None:
                nn.init.zeros_(module.bias)
        elif not isinstance(module, nn.Embedding):
            reset: Callable[[], None] = getattr(module, "reset_parameters", lambda: None)
            reset()  # norms, links, modulations, and what a topology holds itself
    model.positions.copy_(grid_positions(model.config.side, model.config.dim, device))
    draw(model.embedding.weight.flatten(1), generator)
    for weight in (model.label.table.weight, model.timestep.up.weight, model.timestep.down.weight):
        weight.normal_(0, EMBEDDING_STD, generator=generator)
    nn.init.zeros_(model.head.weight)
    rule = model.residual.init_rule
    for block in cast(Iterable["DiTBlock"], model.blocks):
        for sublayer in block.sublayers:
            for projection in (module for module in sublayer.modules() if isinstance(module, nn.Linear)):
                draw(projection.weight, generator, rule.std)
            for role, weight in sublayer.role_weights():
                weight.mul_(rule.scale.get(role, 1.0))


def draw(weight: Tensor, generator: torch.Generator | None, std: float | None = None) -> None:
    """Fill a matrix by its fans, or with the std given; one without memory stays as it is."""
    if weight.is_meta:
        return
    if std is None:
        bound = (6 / (weight.shape[0] + weight.shape[1])) ** 0.5
        weight.uniform_(-bound, bound, generator=generator)
    else:
        weight.normal_(0, std, generator=generator)
