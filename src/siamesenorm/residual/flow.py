"""One forward pass through a topology, sublayer by sublayer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from siamesenorm.errors import TopologyError

if TYPE_CHECKING:
    from siamesenorm.residual.base import Topology

Streams: TypeAlias = Any  # a tensor, or a tuple of them: whatever the topology carries
Pair: TypeAlias = tuple[Tensor, Tensor]  # two streams


class Gated(NamedTuple):
    """What a sublayer may return instead of a tensor: an output, and a gate (adaLN-Zero) that multiplies its update.

    The gate works where an update is dropped: on what is added to the stream(s), behind any norm of the update.
    """

    output: Tensor
    gate: Tensor


def output_of(result: Any) -> tuple[Any, Tensor | None]:
    """Output and gate of what a sublayer returned: a tensor, `Gated`, or a tuple whose first element is the output."""
    if isinstance(result, Gated):
        return result
    return result[0] if isinstance(result, tuple) and result else result, None


def check_returned(name: str, index: int, output: Any, shape: torch.Size) -> None:
    """Raise unless a sublayer returned a tensor of the shape that it read."""
    got = output.shape if isinstance(output, Tensor) else type(output).__name__
    if got != shape:
        raise TopologyError(
            f"{name}: sublayer {index} must return one tensor of shape {tuple(shape)}, "
            f"got {got if isinstance(got, str) else tuple(got)}"
        )


class Flow:
    """One forward pass through a topology: holds the streams while a model sends its sublayers through.

    ::

        flow = residual.start(x)
        for block in self.blocks:
            flow.through(block.attention, mask)
            flow.through(block.ffn)
        x = flow.close()

    `through` is ``h = flow.read()``, the sublayer, ``flow.write(output)``; either may be called by hand.
    `at` and `streams` restart a pass in the middle of the stack, as pipelines and checkpointed blocks do.
    """

    def __init__(self, topology: Topology, x: Tensor | None = None, *, streams: Streams = None, at: int = 0) -> None:
        self.topology, self.index = topology, at
        if not 0 <= at <= len(topology.links):
            raise TopologyError.not_allowed(f"{topology.name}: at =", at, f"0 to {len(topology.links)}")
        if (x is None) == (streams is None):
            raise TopologyError(f"{topology.name}: a pass starts from an embedding or from streams, one of the two")
        topology.check_needs()
        topology.check_step()
        if x is not None:
            topology.check_input(x)
            streams = topology.open(x)
        self._streams = streams
        self._read: torch.Size | None = None

    def read(self) -> Tensor:
        """What the next sublayer sees."""
        if self.index >= len(self.topology.links):
            raise TopologyError(
                f"{self.topology.name}: the stack has {len(self.topology.links)} sublayers, one more was run"
            )
        self._check_written()
        self._streams, h = self.topology.links[self.index](self._streams)
        self._read = h.shape
        return h

    def write(self, output: Tensor, gate: Tensor | None = None) -> None:
        """Take the output of the sublayer that was read last, and a gate that its update is multiplied by."""
        if self._read is None:
            raise TopologyError(f"{self.topology.name}: sublayer {self.index} was written before it was read")
        check_returned(self.topology.name, self.index, output, self._read)
        self._streams = self.topology.links[self.index].add(self._streams, output, gate)  # type: ignore[operator]
        self._read = None
        self.index += 1

    def through(self, sublayer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Read, call ``sublayer(h, *args, **kwargs)``, write its output and return what it returned.

        A sublayer may return a tuple (attention weights, a cache); its output is the first element. It may also
        return `Gated`.
        """
        result = sublayer(self.read(), *args, **kwargs)
        self.write(*output_of(result))
        return result

    @property
    def streams(self) -> Streams:
        """The streams after the last write; between sublayers, never between a read and its write."""
        self._check_written()
        return self._streams

    def close(self) -> Tensor:
        """The stack's output; every sublayer must have been run."""
        if self.index != len(self.topology.links):
            raise TopologyError(
                f"{self.topology.name}: the stack has {len(self.topology.links)} sublayers, {self.index} were run"
            )
        return self.topology.close(self.streams)

    def _check_written(self) -> None:
        if self._read is not None:
            raise TopologyError(f"{self.topology.name}: sublayer {self.index} was read but not written")
