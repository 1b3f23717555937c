"""Topologies whose block input skips over the whole block: SpanNorm and B2T.

The stream is a pair (block input, current value). Blocks of more than two sublayers keep Post-Norm inside and
the long skip at their last sublayer; with a single sublayer both come down to Post-Norm. [our choice: the
papers have (attention, ffn) blocks only]
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor, nn

from siamesenorm.residual.base import InitRule, Link, Topology
from siamesenorm.residual.drop import Keep
from siamesenorm.residual.flow import Pair
from siamesenorm.residual.options import Options, option
from siamesenorm.residual.places import Place
from siamesenorm.residual.summands import mean_gain


class InnerLink(Link):
    """A sublayer before the last of a SpanNorm block."""

    equation = "u = N(u + F(u)); the block input waits"

    def __init__(self, norm: nn.Module, read_norm: nn.Module | None = None) -> None:
        super().__init__()
        self.norm, self.read_norm = norm, read_norm

    def read(self, streams: Pair) -> tuple[Pair, Tensor]:
        """The current value; block 0 of SpanNorm reads it normalised."""
        current = streams[1]
        return streams, current if self.read_norm is None else self.read_norm(current)

    def write(self, streams: Pair, output: Tensor, keep: Keep = None) -> Pair:
        """Post-Norm on the current value."""
        block_input, current = streams
        return block_input, self.norm(current + self.dropped(output, keep))

    def read_gain(self, previous: Link | None) -> float:
        """That of the norm before the sublayer, or else of the last one on the stream."""
        return super().read_gain(previous) if self.read_norm is None else mean_gain(self.read_norm)

    @property
    def written_norm(self) -> nn.Module:
        """N."""
        return self.norm


class SkipInnerLink(InnerLink):
    """A sublayer before the last of a B2T block."""

    equation = "u = N(u + F(u)), and u goes on to the skip"

    def depth_powers(self) -> dict[str, float]:
        """The norm: its gains multiply each other along the stream."""
        return {"norm": 1.0}


class SpanLink(SkipInnerLink):
    """The last sublayer of a SpanNorm block."""

    equation = "x = N2(x + F(u)): the skip comes from the block input, which then moves on"

    def write(self, streams: Pair, output: Tensor, keep: Keep = None) -> Pair:
        """The next block's input and current value, one and the same."""
        x = self.norm(streams[0] + self.dropped(output, keep))
        return x, x


class BottomToTopLink(SkipInnerLink):
    """The last sublayer of a B2T block."""

    equation = "x = N2(x + u + F(u)): the block input joins the usual skip"

    def write(self, streams: Pair, output: Tensor, keep: Keep = None) -> Pair:
        """The next block's input and current value, one and the same."""
        block_input, current = streams
        x = self.norm(block_input + current + self.dropped(output, keep))
        return x, x


class BlockSkip(Topology):
    """What SpanNorm and B2T share: the pair of streams and Post-Norm inside the block."""

    beginning = "x = embed, which is also the first block's input"

    streams = "1 + block input"
    kind = "post"
    has_final_norm = False
    inner_link: ClassVar[type[InnerLink]] = InnerLink
    last_link: ClassVar[type[InnerLink]]

    def link(self, place: Place) -> Link:
        """Post-Norm inside a block, the long skip at its last sublayer."""
        if place.size == 1:
            return SpanLink(self.norm("stream"), self.read_norm(place))
        return (self.last_link if place.ends_block else self.inner_link)(self.norm("stream"), self.read_norm(place))

    def read_norm(self, place: Place) -> nn.Module | None:
        """A norm on what the sublayer reads, where the topology has one."""
        return None

    def open(self, x: Tensor) -> Pair:
        """The embedding is the first block's input."""
        return x, x

    def close(self, streams: Pair) -> Tensor:
        """The current value; it is normalised already."""
        return streams[1]

    def named_streams(self, streams: Pair) -> dict[str, Tensor]:
        """The current value; between blocks it is the block input too."""
        return {"x": streams[1]}


BRANCH_STD = {"1/sqrt(L)": -0.5, "1/L": -1.0, "1": 0.0}


@dataclass(frozen=True)
class SpanOptions(Options):
    """The depth-scaled initialisation."""

    branch_std: Literal["1/sqrt(L)", "1/L", "1"] = option(
        "1/sqrt(L)", "std of a branch's output at start, as a factor on the output projections' std"
    )


class Span(BlockSkip):
    """SpanNorm (arXiv 2601.22580)."""

    name = "span"
    about = """
    SpanNorm: ``u = N1(x + Attn(x)); x = N2(x + FFN(u))``. arXiv 2601.22580.

    Block 0 attends to ``N(x)`` and its skip is raw x. The law of the depth-scaled initialisation is not
    published; ``branch_std`` is our choice.
    """
    equation = "u = N1(x + Attn(x));  x = N2(x + FFN(u))"
    end = "–"
    arxiv = "2601.22580"
    options_class = SpanOptions
    options: SpanOptions
    last_link = SpanLink
    drawing = """
 x ──┬──────────────────────────────────────────(+)──▶ N2 ──▶ x
     ├───────────(+)──▶ N1 ──▶ u ──▶ FFN ─────────┘
     └──▶ Attn ────┘                            block 0: Attn(N x)"""

    def read_norm(self, place: Place) -> nn.Module | None:
        """The raw embedding is normalised for block 0's first sublayer."""
        return self.norm("input") if place.index == 0 else None

    @property
    def init_rule(self) -> InitRule:
        """Output projections scaled by depth; no other depth factor."""
        factor = (self.base_blocks or self.places[0].blocks) ** BRANCH_STD[self.options.branch_std]
        return InitRule({"attention_out": factor, "ffn_out": factor}, keeps_depth_factor=False)


class BottomToTop(BlockSkip):
    """B2T connection (arXiv 2206.00330)."""

    name = "b2t"
    about = """
    B2T connection: ``u = N1(x + Attn(x)); x = N2(x + u + FFN(u))``. arXiv 2206.00330.
    """
    equation = "u = N1(x + Attn(x));  x = N2(x + u + FFN(u))"
    end = "–"
    arxiv = "2206.00330"
    inner_link = SkipInnerLink
    last_link = BottomToTopLink
    drawing = """
 x ──┬────────────────────────────────────────────────(+)──▶ N2 ──▶ x
     ├───────────(+)──▶ N1 ──▶ u ──┬───────────(+)──────┘
     └──▶ Attn ────┘               └──▶ FFN ─────┘"""
