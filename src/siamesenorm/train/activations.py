"""Activation checkpointing, put around a model from outside: what backward computes again instead of keeping.

| kind        | kept                                                        | computed again                       |
|-------------|-------------------------------------------------------------|--------------------------------------|
| `full`      | the streams between blocks                                  | each block                           |
| `sublayer`  | what each sublayer reads and writes                         | its inside                           |
| `selective` | the streams between blocks, matrix products and attention   | all else: norms, links, activations  |

``every``: of so many blocks, one is computed again, and the others keep everything.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint, create_selective_checkpoint_contexts

from siamesenorm.errors import ConfigError
from siamesenorm.layers import grouped as grouped  # which makes the operator of experts
from siamesenorm.models.stack import Block, Context, Runner, Stack, run_block
from siamesenorm.residual.flow import Streams

KINDS = ("none", "full", "sublayer", "selective")
KEPT = [
    torch.ops.aten.mm.default,
    torch.ops.aten.addmm.default,
    torch.ops.aten._scaled_dot_product_flash_attention.default,
    torch.ops.aten._scaled_dot_product_efficient_attention.default,
    torch.ops.aten._scaled_dot_product_cudnn_attention.default,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu.default,
    torch.ops.higher_order.flex_attention,
    torch.ops.siamesenorm.grouped_linear.default,
]
"""Operators whose outputs ``selective`` keeps: they take nearly all of a block's time."""


def checkpoint_activations(model: nn.Module, kind: str, every: int = 1) -> None:
    """Let a model compute its blocks in this way; before they are compiled."""
    if kind == "none":
        return
    if not isinstance(model, Stack):
        raise ConfigError.refused("train.activation_checkpointing", kind, f"{type(model).__name__} takes none")
    blocks: list[Block] = list(model.blocks[every - 1 :: every])  # type: ignore[arg-type]  # ModuleList holds blocks
    recomputed = partial(checkpoint, use_reentrant=False)
    if kind == "full":
        model.run = recomputed if every == 1 else only(blocks, recomputed)
    for block in blocks:
        if kind == "sublayer":
            block.run_sublayer = recomputed
        if kind == "selective":  # inside of what is compiled, so that the compiler sees what is kept
            contexts = partial(create_selective_checkpoint_contexts, KEPT)
            block.pure = partial(recomputed, block.pure, context_fn=contexts)  # type: ignore[method-assign]


def only(blocks: list[Block], recomputed: Runner) -> Runner:
    """Some blocks computed again, others not."""
    chosen = {id(block) for block in blocks}

    def run(block: Block, streams: Streams, context: Context) -> tuple[Streams, tuple[object, ...]]:
        return (recomputed if id(block) in chosen else run_block)(block, streams, context)

    return run
