"""Gradient norms by depth: of the loss, at every stream behind every sublayer and at every sublayer's output."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from siamesenorm.lab.inspection.probe import Sight, wide
from siamesenorm.residual import Topology
from siamesenorm.residual.flow import Streams


class Gradients:
    """Norms of the loss's gradient at every stream and depth and at every output; no gradient outlives its number.

    Only the streams take part in the graph, cut off at the start of the stack: parameters get no gradient.
    """

    def __init__(self, topology: Topology) -> None:
        self.topology = topology
        self.sight: Sight | None = None
        self.at: list[dict[str, float]] = []
        self.outputs: list[float] = []

    def cut(self, streams: Streams) -> Streams:
        """Fresh leaves at the start, one for each stream also where all are the same tensor."""
        named = list(self.topology.named_streams(streams).values())
        shared = len({id(stream) for stream in named}) < len(named)
        memos: list[dict[int, Tensor]] = [{}]

        def leaf(x: Tensor) -> Tensor:
            memo = memos[-1]
            if id(x) not in memo:
                memo[id(x)] = x.detach().requires_grad_()
            return memo[id(x)]

        if not shared:
            return pytree.tree_map_only(Tensor, leaf, streams)
        parts = []
        for part in streams:
            parts.append(pytree.tree_map_only(Tensor, leaf, part))
            memos.append({})
        return tuple(parts)

    def follow(self, streams: Streams) -> None:
        """Ask for the gradients of one depth; they become numbers once all streams have theirs."""
        leaves, spec = pytree.tree_flatten(streams)
        numbers: dict[str, float] = {}
        self.at.append(numbers)
        arrived: dict[int, Tensor] = {}
        waiting = {id(x) for x in leaves if x.requires_grad}
        order = [id(x) for x in leaves]
        likes = {id(x): x.detach() for x in leaves if not x.requires_grad}

        def arrive(key: int, grad: Tensor) -> None:
            arrived[key] = grad
            waiting.discard(key)
            if not waiting:
                tree = [arrived[k] if k in arrived else torch.zeros_like(likes[k]) for k in order]
                named = self.topology.named_streams(pytree.tree_unflatten(tree, spec))
                numbers.update({name: self.norm(part) for name, part in named.items()})
                arrived.clear()

        for key, x in {id(x): x for x in leaves if x.requires_grad}.items():
            x.register_hook(lambda grad, key=key: arrive(key, grad))

    def follow_output(self, output: Tensor) -> None:
        """The same at a sublayer's output."""
        index = len(self.outputs)
        self.outputs.append(0.0)
        if output.requires_grad:
            output.register_hook(lambda grad: self.outputs.__setitem__(index, self.norm(grad)))

    def norm(self, grad: Tensor) -> float:
        """Of the summed loss: the mean's gradient times the tokens; root mean square over them."""
        assert self.sight is not None
        rows = wide(self.sight.select(grad))
        return float(rows.square().sum(-1).mean().sqrt()) * self.sight.tokens

    def measure(self, loss: Tensor) -> Gradients:
        """Run the backward pass."""
        if loss.requires_grad:
            loss.backward()
        return self

    @property
    def streams(self) -> dict[str, list[float]]:
        """By depth; 0 where the loss does not depend on a stream."""
        assert self.sight is not None
        return {name: [numbers.get(name, 0.0) for numbers in self.at] for name in self.sight.names}
