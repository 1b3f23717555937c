"""Watching a pass from outside: what every link reads and writes, and what is written in its place.

While `watched` lasts, the methods of the topology and of its links report to a `Watcher`. No model has to know of it:
whoever sends sublayers through a topology calls these methods, and fused steps stand aside where they were replaced.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor, nn

from siamesenorm.errors import InspectionError
from siamesenorm.models.stack import Stack, run_block
from siamesenorm.residual import Link, Place, Topology
from siamesenorm.residual.drop import Keep
from siamesenorm.residual.flow import Streams


class Watcher:
    """Is called at every step of a pass; a subclass overrides what it needs."""

    def opened(self, streams: Streams) -> Streams:
        """The streams at the start; what is returned goes on."""
        return streams

    def read(self, place: Place, link: Link, streams: Streams) -> None:
        """A sublayer is about to read from these streams."""

    def output(self, place: Place, output: Tensor) -> Tensor:
        """A sublayer's output; what is returned is written."""
        return output

    def written(
        self, place: Place, link: Link, before: Streams, output: Tensor, keep: Keep, streams: Streams
    ) -> Streams:
        """The streams after a write, and what it was given; what is returned goes on."""
        return streams

    def closed(self, streams: Streams) -> None:
        """The streams at the end."""


@contextlib.contextmanager
def watched(topology: Topology, watcher: Watcher) -> Iterator[None]:
    """Call a watcher on every pass inside; fused steps run in their plain form meanwhile."""
    with contextlib.ExitStack() as stack:

        def put(owner: nn.Module, name: str, value: Callable[..., Any]) -> None:
            stack.enter_context(replaced(owner, name, value))

        def put_around(place: Place, link: Link) -> None:
            plain_read, plain_write = link.read, link.write

            def read(streams: Streams) -> tuple[Streams, Tensor]:
                watcher.read(place, link, streams)
                return plain_read(streams)

            def write(streams: Streams, output: Tensor, keep: Keep = None) -> Streams:
                output = watcher.output(place, output)
                return watcher.written(place, link, streams, output, keep, plain_write(streams, output, keep))

            put(link, "read", read)
            put(link, "write", write)

        def close(streams: Streams, plain_close: Callable[[Streams], Tensor] = topology.close) -> Tensor:
            watcher.closed(streams)
            return plain_close(streams)

        put(topology, "open", lambda x, plain_open=topology.open: watcher.opened(plain_open(x)))
        put(topology, "close", close)
        for place, link in zip(topology.places, topology.links, strict=True):
            assert isinstance(link, Link)
            put_around(place, link)
        yield


@contextlib.contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Another attribute on one object, for a while."""
    own = name in vars(owner)
    before = vars(owner).get(name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        if own:
            setattr(owner, name, before)
        else:
            delattr(owner, name)


@contextlib.contextmanager
def at_rest(model: nn.Module) -> Iterator[None]:
    """The model in evaluation mode with parameters that take no gradient; everything is as it was afterwards."""
    modes = [(module, module.training) for module in model.modules()]
    wanted = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    try:
        model.eval()
        for parameter, _ in wanted:
            parameter.requires_grad_(False)
        # Blocks that run again in backward would be watched twice.
        plain = replaced(model, "run", run_block) if isinstance(model, Stack) else contextlib.nullcontext()
        with torch.inference_mode(False), torch.compiler.set_stance("force_eager"), plain:
            yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter, requires_grad in wanted:
            parameter.requires_grad_(requires_grad)


def find_residual(model: nn.Module) -> Topology:
    """The one topology of a model that has links; the parts of a pair have none."""
    found = [module for module in model.modules() if isinstance(module, Topology) and len(module.links)]
    if len(found) != 1:
        how_many = f"has {len(found)} residual topologies" if found else "has no residual topology"
        raise InspectionError(f"model: {type(model).__name__} {how_many}; name the one to look at with topology=")
    return found[0]
