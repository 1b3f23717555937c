"""Gradient norms by depth: of the loss, at every stream behind every sublayer and at every sublayer's output."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from siamesenorm.lab.inspection.probe import StreamView, wide
from siamesenorm.residual import Topology
from siamesenorm.residual.flow import Streams


class Gradients:
    """Norms of the loss's gradient at every stream and depth and at every output; no gradient outlives its number.

    Only the streams take part in the graph, cut off at the start of the stack: parameters get no gradient.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.view: StreamView | None = None
        self.at: list[dict[str, float]] = []
        self.outputs: list[float] = []
        self.unfinished: list[Callable[[], None]] = []

    def cut(self, streams: Streams) -> Streams:
        """Fresh leaves at the start, one for each stream also where all are the same tensor."""
        return self.topology.map_streams(streams, lambda x: x.detach().requires_grad_())

    def follow(self, streams: Streams) -> Streams:
        """Ask for the gradients of one depth; they become numbers once all streams have theirs.

        What is returned goes on: a stream that a sublayer leaves as it is would otherwise be one tensor at all depths,
        and its gradient at one of them would count readers that came before.
        """
        streams = self.topology.map_streams(streams, lambda x: x.view_as(x))
        leaves, spec = pytree.tree_flatten(streams)
        numbers = dict.fromkeys(self.topology.named_streams(streams), 0.0)
        self.at.append(numbers)
        order, waiting = [id(x) for x in leaves], {id(x) for x in leaves if x.requires_grad}
        empty = {id(x): torch.zeros_like(x, device="meta") for x in leaves}
        arrived: dict[int, Tensor] = {}

        def finish() -> None:
            if arrived:
                device = next(iter(arrived.values())).device
                tree = [arrived[k] if k in arrived else torch.zeros_like(empty[k], device=device) for k in order]
                named = self.topology.named_streams(pytree.tree_unflatten(tree, spec))
                numbers.update({name: self.norm(part) for name, part in named.items()})
                arrived.clear()

        def arrive(key: int, grad: Tensor) -> None:
            arrived[key] = grad
            waiting.discard(key)
            if not waiting:
                finish()

        for key, x in {id(x): x for x in leaves if x.requires_grad}.items():
            x.register_hook(lambda grad, key=key: arrive(key, grad))
        self.unfinished.append(finish)
        return streams

    def follow_output(self, output: Tensor) -> None:
        """The same at a sublayer's output."""
        index = len(self.outputs)
        self.outputs.append(0.0)
        if output.requires_grad:
            output.register_hook(lambda grad: self.outputs.__setitem__(index, self.norm(grad)))

    def norm(self, grad: Tensor) -> float:
        """Of the summed loss: the mean's gradient times the tokens; root mean square over them."""
        assert self.view is not None
        rows = wide(self.view.select(grad))
        return float(rows.square().sum(-1).mean().sqrt()) * self.view.tokens

    def measure(self, loss: Tensor) -> Gradients:
        """Run the backward pass."""
        if loss.requires_grad:
            loss.backward()
        for finish in self.unfinished:  # where a stream is read by nobody any more, its gradient never comes
            finish()
        return self

    @property
    def streams(self) -> dict[str, tuple[float | None, ...]]:
        """By depth; 0 where the loss does not depend on a stream, None where there is no such stream."""
        names = dict.fromkeys(name for numbers in self.at for name in numbers)
        return {name: tuple(numbers.get(name) for numbers in self.at) for name in names}
