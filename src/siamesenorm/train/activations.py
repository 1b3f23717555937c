"""Activation checkpointing, put around a model from outside: what backward computes again instead of keeping.

``full`` keeps the streams between blocks and computes each block again. ``sublayer`` keeps what each sublayer reads
and writes and computes its inside again.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint

from siamesenorm.residual import Flow
from siamesenorm.train.errors import ConfigError


def run_block_again(block: nn.Module, flow: Flow, context: Any) -> tuple[Flow, tuple[Any, ...]]:
    """Run a block of which nothing but the streams before it is kept."""
    topology, index = flow.topology, flow.index

    def run(streams: Any, context: Any) -> tuple[Any, int, tuple[Any, ...]]:
        inner = Flow(topology, streams=streams, at=index)
        reported = block(inner, context)
        return inner.streams, inner.index, reported

    streams, index_behind, reported = checkpoint(run, flow.streams, context, use_reentrant=False)
    return Flow(topology, streams=streams, at=index_behind), reported


class _SublayersAgain:
    """A flow that sends each sublayer through checkpointing."""

    def __init__(self, flow: Flow) -> None:
        self.flow = flow

    def through(self, sublayer: Any, *args: Any, **kwargs: Any) -> Any:
        """As `Flow.through`."""
        return self.flow.through(partial(checkpoint, sublayer, use_reentrant=False), *args, **kwargs)


def run_sublayers_again(block: nn.Module, flow: Flow, context: Any) -> tuple[Flow, tuple[Any, ...]]:
    """Run a block whose sublayers keep nothing inside."""
    return flow, block(_SublayersAgain(flow), context)


RUNNERS = {"full": run_block_again, "sublayer": run_sublayers_again}


def checkpoint_activations(model: nn.Module, kind: str) -> None:
    """Let a model with a `run` hook compute blocks in this way."""
    if kind == "none":
        return
    if not hasattr(model, "run"):
        raise ConfigError(f"train.activation_checkpointing: {kind!r} is not allowed; {type(model).__name__} takes none")
    model.run = RUNNERS[kind]  # type: ignore[assignment]
