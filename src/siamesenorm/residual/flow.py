"""One forward pass through a topology, sublayer by sublayer."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any, NamedTuple, TypeAlias

import torch
from torch import Tensor

from siamesenorm.residual.errors import TopologyError
from siamesenorm.residual.fused.recompute import remembering

if TYPE_CHECKING:
    from siamesenorm.residual.base import Topology

Streams: TypeAlias = Any  # a tensor, or a tuple of them: whatever the topology carries


class Gated(NamedTuple):
    """What a sublayer may return instead of a tensor: an output, and a gate (adaLN-Zero) that its update is times.

    The gate works where an update is dropped: on what is added to the stream(s), behind any norm of the update.
    """

    output: Tensor
    gate: Tensor


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
            raise TopologyError(f"{topology.name}: at = {at} is not allowed; it takes 0 to {len(topology.links)}")
        if (x is None) == (streams is None):
            raise TopologyError(f"{topology.name}: a pass starts from an embedding or from streams, one of the two")
        topology.check_needs()
        if x is not None:
            topology.check_input(x)
            streams = topology.open(x)
        self._streams = streams
        # An output not yet written, and its gate, so that write and read can be one step.
        self._pending: tuple[Tensor, Tensor | None] | None = None
        self._read: torch.Size | None = None

    def read(self) -> Tensor:
        """What the next sublayer sees."""
        if self.index >= len(self.topology.links):
            raise TopologyError(
                f"{self.topology.name}: the stack has {len(self.topology.links)} sublayers, one more was run"
            )
        if self._read is not None:
            raise TopologyError(f"{self.topology.name}: sublayer {self.index} was read but not written")
        if self._pending is None:
            self._streams, h = self.topology.links[self.index].read(self._streams)  # type: ignore[operator]
        else:
            self._streams, h = self.topology.step(self.index - 1, self._streams, *self._pending)
            self._pending = None
        self._read = h.shape
        return h

    def write(self, output: Tensor, gate: Tensor | None = None) -> None:
        """Take the output of the sublayer that was read last, and a gate that its update is multiplied by."""
        if self._read is None:
            raise TopologyError(f"{self.topology.name}: sublayer {self.index} was written before it was read")
        shape = output.shape if isinstance(output, Tensor) else type(output).__name__
        if shape != self._read:
            raise TopologyError(
                f"{self.topology.name}: sublayer {self.index} must return one tensor of shape {tuple(self._read)}, "
                f"got {shape if isinstance(shape, str) else tuple(shape)}"
            )
        self._pending, self._read = (output, gate), None
        self.index += 1

    def through(self, sublayer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Read, call ``sublayer(h, *args, **kwargs)``, write its output and return what it returned.

        A sublayer may return a tuple (attention weights, a cache); its output is the first element. It may also
        return `Gated`.
        """
        h = self.read()
        with remembering(h):
            result = sublayer(h, *args, **kwargs)
        if isinstance(result, Gated):
            self.write(*result)
        else:
            self.write(result[0] if isinstance(result, tuple) and result else result)
        return result

    @property
    def streams(self) -> Streams:
        """The streams after the last write; between sublayers, never between a read and its write."""
        if self._read is not None:
            raise TopologyError(f"{self.topology.name}: sublayer {self.index} was read but not written")
        if self._pending is not None:
            self._streams = self.topology.write(self.index - 1, self._streams, *self._pending)
            self._pending = None
        return self._streams

    def close(self) -> Tensor:
        """The stack's output; every sublayer must have been run."""
        if self.index != len(self.topology.links):
            raise TopologyError(
                f"{self.topology.name}: the stack has {len(self.topology.links)} sublayers, {self.index} were run"
            )
        return self.topology.close(self.streams)
