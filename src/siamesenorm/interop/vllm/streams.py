"""Residual streams between pipeline ranks: as tensors whose first dimension is the token, which vLLM cuts and sends."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from siamesenorm.residual import Topology
from siamesenorm.residual.flow import Streams

PROBE = 7919
"""A number of tokens that is no other size of a stream."""


class Wire:
    """How the streams look in front of a block: their nesting, and where each has its tokens."""

    def __init__(self, topology: Topology, block: int) -> None:
        with torch.device("meta"):
            streams = topology.open(torch.empty(1, PROBE, topology.dim))
            for link in list(topology.links)[: 2 * block]:
                streams, seen = link(streams)
                streams = link.add(streams, seen)  # type: ignore[operator]
        leaves, self.layout = pytree.tree_flatten(streams)
        self.shapes = [leaf.shape for leaf in leaves]
        self.axes = [shape.index(PROBE) for shape in self.shapes]
        self.names = [f"stream_{number}" for number in range(len(leaves))]

    def pack(self, streams: Streams) -> dict[str, Tensor]:
        """The streams by name, token by token."""
        leaves = pytree.tree_leaves(streams)
        return {
            name: leaf.movedim(axis, 0).contiguous()
            for name, leaf, axis in zip(self.names, leaves, self.axes, strict=True)
        }

    def unpack(self, tensors: dict[str, Tensor]) -> Streams:
        """The streams again."""
        leaves = [tensors[name].movedim(0, axis) for name, axis in zip(self.names, self.axes, strict=True)]
        return pytree.tree_unflatten(leaves, self.layout)

    def empty(self, tokens: int, dtype: torch.dtype, device: torch.device) -> dict[str, Tensor]:
        """What is received, before it is received."""
        made = {}
        for name, shape, axis in zip(self.names, self.shapes, self.axes, strict=True):
            rest = [size for number, size in enumerate(shape) if number != axis]
            made[name] = torch.zeros(tokens, *rest, dtype=dtype, device=device)
        return made
