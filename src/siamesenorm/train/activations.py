"""Activation checkpointing, put around a model from outside: what backward computes again instead of keeping.

``full`` keeps the streams between blocks and computes each block again. ``sublayer`` keeps what each sublayer reads
and writes and computes its inside again.
"""

from __future__ import annotations

from functools import partial

from torch import nn
from torch.utils.checkpoint import checkpoint

from siamesenorm.models.stack import Stack
from siamesenorm.train.errors import ConfigError

KINDS = ("none", "full", "sublayer")


def checkpoint_activations(model: nn.Module, kind: str) -> None:
    """Let a model compute its blocks in this way; before they are compiled."""
    if kind == "none":
        return
    if not isinstance(model, Stack):
        raise ConfigError(f"train.activation_checkpointing: {kind!r} is not allowed; {type(model).__name__} takes none")
    recomputed = partial(checkpoint, use_reentrant=False)
    if kind == "full":
        model.run = recomputed
        return
    for block in model.blocks:
        block.run_sublayer = recomputed  # type: ignore[assignment]  # ModuleList holds blocks
