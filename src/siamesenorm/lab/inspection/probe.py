"""What measurements share: the streams by name as rows of tokens, and the moments of a pass at which they look."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from siamesenorm.residual import Link, Place, Topology
from siamesenorm.residual.drop import Keep
from siamesenorm.residual.flow import Streams


def wide(x: Tensor) -> Tensor:
    """x in float64 to add it up, or in float32 on devices that have no more."""
    return x.detach().to(torch.float32 if x.device.type == "mps" else torch.float64)


class Series:
    """Values by stream and place, a depth or a sublayer; streams may come into being on the way."""

    def __init__(self) -> None:
        self.at: dict[str, dict[int, Any]] = {}

    def put(self, name: str, place: int, value: Any) -> None:
        """The value of a stream at a place."""
        self.at.setdefault(name, {})[place] = value

    def tuples(self, places: int) -> dict[str, tuple[Any, ...]]:
        """All places in order, None where a stream has no value."""
        return {name: tuple(values.get(place) for place in range(places)) for name, values in self.at.items()}


class StreamView:
    """Rows of a topology's streams, of the tokens that count.

    counted: True for these tokens, of the batch's shape; None: all. A mask of another shape than the stack's tokens
    (a class token more, say) is left aside.
    """

    def __init__(self, topology: Topology, counted: Tensor | None, shape: torch.Size) -> None:
        self.topology, self.batch_dims = topology, len(shape)
        self.counted = counted if counted is not None and counted.shape == shape else None
        whole = torch.ones(shape, dtype=torch.bool) if self.counted is None else self.counted
        self._places = whole.nonzero()

    @property
    def tokens(self) -> int:
        """How many count."""
        return len(self._places)

    def select(self, x: Tensor) -> Tensor:
        """(..., dim) to (tokens that count, dim)."""
        x = x.detach()
        return x.reshape(-1, x.shape[-1]) if self.counted is None else x[self.counted.to(x.device)]

    def tokenwise(self, x: Tensor, tokens: Tensor) -> Tensor:
        """Some of the tokens that count, by their numbers, of a tensor whose first dimensions are the batch's."""
        flat = x.detach().reshape(-1, *x.shape[self.batch_dims :])
        chosen = tokens if self.counted is None else self.counted.flatten().nonzero().flatten().cpu()[tokens]
        return flat[chosen.to(x.device)]

    def rows(self, streams: Streams) -> dict[str, Tensor]:
        """Every stream by name, (tokens that count, dim)."""
        return {name: self.select(stream) for name, stream in self.topology.named_streams(streams).items()}

    def places(self, tokens: Tensor) -> Tensor:
        """Where in the batch tokens that count stand."""
        return self._places[tokens.to(self._places.device)]

    def sample(self, most: int) -> Tensor:
        """Numbers of at most so many tokens that count, evenly spaced."""
        if self.tokens <= most:
            return torch.arange(self.tokens)
        return torch.arange(most) * self.tokens // most


class Probe:
    """One measurement: looks at some moments of a pass, without a graph, and keeps numbers alone."""

    def __init__(self, view: StreamView) -> None:
        self.view = view
        self.series = Series()

    def at_depth(self, depth: int, streams: Streams) -> None:
        """The streams at the start (0) and behind every sublayer."""

    def at_read(self, place: Place, link: Link, previous: Link | None, streams: Streams) -> None:
        """The streams that a sublayer is about to read."""

    def at_write(self, place: Place, link: Link, before: Streams, output: Tensor, keep: Keep, streams: Streams) -> None:
        """What was given to a write, and what it made."""

    def at_end(self, streams: Streams) -> None:
        """The streams at the end."""
