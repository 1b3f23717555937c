"""The writers' map: how much of what a sublayer sees, and of the stack's output, each writer has put there.

Writers are the embedding and every sublayer, readers are every sublayer and the end. With gates, mixing weights and
the statistics of norms held as they are in this pass (`siamesenorm.residual.frozen`), a reading h is linear in what
the writers have put out, h = sum_w c_w. The share of a writer is the part of h that its component makes along h::

    share_w = sum over tokens <c_w, h> / sum over tokens |h|²

Shares of a reader sum to one. One is negative where a component points away from the reading. Biases of norms or of
the topology belong to no writer: what they have is given apart, as constants.

All shares of a reader come from one backward pass over the links alone: <c_w, h> = <gradient of <h, held h>, output_w>.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from siamesenorm.lab.inspection.probe import Probe, StreamView, wide
from siamesenorm.lab.inspection.result import Writers
from siamesenorm.residual import Link, Place
from siamesenorm.residual.drop import Keep
from siamesenorm.residual.flow import Streams
from siamesenorm.residual.frozen import frozen

TOKENS = 256
"""Tokens that are followed at most."""


class WritersMap(Probe):
    """Keeps what every writer has put out for some tokens, and then sends it through the links again."""

    def __init__(self, view: StreamView) -> None:
        super().__init__(view)
        self.sampled = view.sample(TOKENS)
        self.opened: Streams = None
        self.outputs: list[tuple[Tensor, Keep]] = []

    def at_depth(self, depth: int, streams: Streams) -> None:
        """The streams at the start are the embedding's."""
        if depth == 0:
            self.opened = pytree.tree_map_only(Tensor, self.some, streams)

    def at_write(self, place: Place, link: Link, before: Streams, output: Tensor, keep: Keep, streams: Streams) -> None:
        """Output and gate of every sublayer."""
        self.outputs.append((self.some(output), None if keep is None else self.some(keep.expand_as(output))))

    def some(self, x: Tensor) -> Tensor:
        """Of the sampled tokens."""
        return self.view.tokenwise(x, self.sampled)

    def measure(self) -> Writers:
        """One pass through the links, with a backward pass for every reader."""
        topology = self.view.topology
        shares: list[tuple[float, ...]] = []
        with torch.enable_grad(), frozen():
            streams = topology.map_streams(self.opened, lambda x: x.detach().requires_grad_())
            writers = [[leaf for leaf in pytree.tree_leaves(streams) if leaf.is_leaf and leaf.requires_grad]]
            for link, (output, keep) in zip(topology.links, self.outputs, strict=True):
                assert isinstance(link, Link)
                streams, h = type(link).read(link, streams)
                shares.append(shares_in(h, writers))
                writers.append([output.requires_grad_()])
                streams = type(link).write(link, streams, output, keep)
            shares.append(shares_in(type(topology).close(topology, streams), writers))
        constants = tuple(1 - sum(row) for row in shares)
        return Writers(tokens=len(self.sampled), shares=tuple(shares), constants=constants)


def shares_in(h: Tensor, writers: list[list[Tensor]]) -> tuple[float, ...]:
    """What each writer, given by the tensors that it has put out, has in h."""
    size = wide(h).square().sum()
    given = [x for tensors in writers for x in tensors]
    gradients = torch.autograd.grad(h, given, h.detach(), retain_graph=True, allow_unused=True)
    found = iter(0.0 if g is None else (wide(g) * wide(x)).sum() / size for g, x in zip(gradients, given, strict=True))
    return tuple(float(sum(next(found) for _ in tensors)) for tensors in writers)
