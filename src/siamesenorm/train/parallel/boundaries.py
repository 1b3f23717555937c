"""What a topology carries between two blocks: how many tensors, of which shapes, and who has its own parameters.

Computed on ``meta``, where a pass through the links alone costs no memory and next to no time.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from siamesenorm.errors import ConfigError
from siamesenorm.models.stack import Stack
from siamesenorm.residual import Topology
from siamesenorm.residual.flow import Streams


class Boundaries:
    """The streams in front of every block of a stack."""

    def __init__(self, model: Stack[Any]) -> None:
        self.dtype = next(model.parameters()).dtype
        with torch.device("meta"):
            self.residual: Topology = type(model)(model.config).to(self.dtype).residual
        for link in self.residual.links:  # a plain list, which the module does not move
            link.to(self.dtype)

    def at(self, block: int, rows: int, tokens: int) -> tuple[tuple[Tensor, ...], Any]:
        """The tensors that travel in front of a block, and how the streams among them are nested.

        The last one is a row of three sums, of what the routers of experts report.
        """
        x = torch.empty(rows, tokens, self.residual.dim, dtype=self.dtype, device="meta", requires_grad=True)
        leaves, layout = pytree.tree_flatten(carried(self.residual, block, x))
        sizes = [(leaf.shape, leaf.requires_grad) for leaf in leaves] + [(torch.Size([3]), True)]
        empty = (torch.empty(size, dtype=self.dtype, device="meta", requires_grad=grad) for size, grad in sizes)
        return tuple(empty), layout


@torch.enable_grad()
def carried(residual: Topology, block: int, x: Tensor | None = None, start: Streams = None) -> Streams:
    """The streams in front of a block, of an embedding or of what streams start with."""
    with torch.device("meta"):
        streams = start if x is None else residual.open(x)
        for link in list(residual.links)[: 2 * block]:
            streams, seen = link(streams)
            streams = link.add(streams, seen)  # type: ignore[operator]
    return streams


def used_by_open(residual: Topology, dtype: torch.dtype) -> set[str]:
    """Parameters of a topology, by name, that its start needs; its end has the others.

    Raises where blocks need some of them: these would be in several stages.
    """
    first = carried(residual, 0, torch.empty(1, 1, residual.dim, dtype=dtype, device="meta", requires_grad=True))
    apart = pytree.tree_map(lambda leaf: leaf.detach().requires_grad_(), first)
    inside = _used(residual, carried(residual, len(residual.places) // 2, start=apart))
    if inside:
        raise ConfigError(
            f"parallel.pp: pipelines are not allowed for {residual.name}, whose blocks share {min(inside)}"
        )
    return _used(residual, first)


def _used(residual: nn.Module, streams: Streams) -> set[str]:
    named = dict(residual.named_parameters())
    leaves = [leaf for leaf in pytree.tree_leaves(streams) if leaf.requires_grad]
    if not named or not leaves:
        return set()
    grads = torch.autograd.grad([leaf.sum() for leaf in leaves], list(named.values()), allow_unused=True)
    return {name for name, grad in zip(named, grads, strict=True) if grad is not None}
