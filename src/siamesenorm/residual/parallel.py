"""Parallel sublayers: all of a block's read the block's input, each through a norm of its own.

The stream is a pair (block input, current value); between blocks both are one and the same.
"""

from __future__ import annotations

from torch import Tensor, nn

from siamesenorm.residual.base import Link, Topology
from siamesenorm.residual.drop import Keep
from siamesenorm.residual.flow import Pair
from siamesenorm.residual.places import Place
from siamesenorm.residual.pre import PreLink


class ParallelLink(PreLink):
    """A sublayer beside others on one block input."""

    equation = "y = y + F(N x); the block input x stays, until the block ends"

    def __init__(self, norm: nn.Module, ends_block: bool) -> None:
        super().__init__(norm)
        self.ends_block = ends_block

    def read(self, streams: Pair) -> tuple[Pair, Tensor]:  # type: ignore[override]
        """N of the block input."""
        return streams, self.norm(streams[0])

    def write(self, streams: Pair, output: Tensor, keep: Keep = None) -> Pair:  # type: ignore[override]
        """The update joins the current value, which is the next block's input."""
        x, y = streams
        y = y + self.dropped(output, keep)
        return (y, y) if self.ends_block else (x, y)


class Parallel(Topology):
    """Parallel attention and FFN (arXiv 2204.06745)."""

    name = "parallel"
    about = """
    Parallel attention and FFN (GPT-NeoX): ``x = x + Attn(N1 x) + FFN(N2 x)``, ``out = N(x)``. arXiv 2204.06745.
    """
    equation = "x = x + Attn(N1 x) + FFN(N2 x)"
    beginning = "x = embed, which is also the first block's input"
    end = "N x"
    arxiv = "2204.06745"
    streams = "1 + block input"
    kind = "pre"
    drawing = """
 x ──┬────────────────────(+)──(+)──▶ x
     ├──▶ N1 ──▶ Attn ─────┘    │
     └──▶ N2 ──▶ FFN ───────────┘"""

    def link(self, place: Place) -> Link:
        """Every sublayer reads a normalised copy of the block input."""
        return ParallelLink(self.norm("input"), place.ends_block)

    def open(self, x: Tensor) -> Pair:
        """The embedding is the first block's input."""
        return x, x

    def close(self, streams: Pair) -> Tensor:
        """N of the current value."""
        return super().close(streams[1])

    def named_streams(self, streams: Pair) -> dict[str, Tensor]:
        """The current value; between blocks it is the block input too."""
        return {"x": streams[1]}
