"""A blend: Pre-Norm that becomes another topology over training, for grafts that are not exact.

Both topologies carry their own stream(s) and are written with the same outputs; what sublayers and the head see is
``(1 - b)`` times Pre-Norm's reading plus b times the other's. At b = 0 it is Pre-Norm and at b = 1 the other, exactly,
whatever the other is. b is a buffer: checkpoints keep it, and no graph is compiled again when it changes.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from torch import Tensor, nn

from siamesenorm.errors import TopologyError
from siamesenorm.residual.base import Growth, InitRule, Link, SublayerNeeds, Topology
from siamesenorm.residual.drop import Keep
from siamesenorm.residual.flow import Streams
from siamesenorm.residual.options import Options, option
from siamesenorm.residual.places import Place, kinds_of
from siamesenorm.residual.pre import Pre
from siamesenorm.residual.ramp import Share
from siamesenorm.residual.summands import Sum

Both = tuple[Tensor, Streams]
SEPARATOR = ";"
"""Between options of the target, since commas stand between those of the blend."""


@dataclass(frozen=True)
class BlendOptions(Options):
    """The way from Pre-Norm."""

    to: str = option("sandwich", "the other topology, as name or name:option=value;option=value")
    steps: int = option(1000, "steps over which b goes from 0 to 1", low=1, high=10**9)
    start: int = option(0, "steps before it begins to", low=0, high=10**9)
    qk_norm: Literal["none", "head", "projection"] = option(
        "none", "norm on queries and keys that was there before; others grow in with b"
    )


class BlendLink(Link):
    """On the way from Pre-Norm to another topology."""

    equation = "h = (1 - b) N x + b read(S);  x = x + O;  S = write(S, O)"

    def __init__(self, source: Link, target: Link, share: Share) -> None:
        super().__init__()
        self.source, self.target, self.share = source, target, share

    def read(self, streams: Both) -> tuple[Both, Tensor]:
        """What either sees, blended."""
        x, seen = self.source(streams[0])
        S, new = self.target(streams[1])
        return (x, S), self.share.blend(seen, new)

    def write(self, streams: Both, output: Tensor, keep: Keep = None) -> Both:
        """One output, and one draw of dropout, for both."""
        keep = self.draw(output) if keep is None else keep
        return self.source.write(streams[0], output, keep), self.target.write(streams[1], output, keep)

    def summands(self, streams: Both, previous: Link | None) -> Sum:
        """Those of either, with their shares."""
        before = (previous.source, previous.target) if isinstance(previous, BlendLink) else (None, None)
        old = self.source.summands(streams[0], before[0]).finished()
        return shared(self.share, old, self.target.summands(streams[1], before[1]).finished())


class Blend(Topology):
    """(1 - b) Pre-Norm + b of another topology, b from 0 to 1 over training."""

    name = "blend"
    equation = "h = (1 - b) N x + b read(S);  x = x + O;  S = write(S, O)"
    end = "(1 - b) N x + b close(S)"
    arxiv = "–"
    streams = "1 + the other's"
    kind = "several"
    options_class = BlendOptions
    options: BlendOptions
    has_final_norm = False
    drawing = """
 x ──┬──────────────────────────────(+)──▶ x     Pre-Norm
     └──▶ N ──▶ ·(1-b) ──┐           │
                        (+)──▶ F ────┤ O
     ┌──▶ read ──▶ ·b ───┘           ▼
 S ──┴─────────────────────────▶ write ──▶ S     the other

 b = (t - 1 - start) / steps, within 0 and 1, at step t = 1, 2, …"""

    def setup(self) -> None:
        """Both topologies' starts and ends."""
        from siamesenorm.residual.registry import TOPOLOGIES, parse_topology  # the registry imports this module

        name, options = parse_topology(self.options.to.replace(SEPARATOR, ","))
        if self.options.prores or name not in TOPOLOGIES or "prores" in options:
            raise TopologyError.not_allowed("blend", self.options.to, "topologies without prores")
        blocks: list[list[str]] = kinds_of(self.places)
        how: dict[str, Any] = {"norm": self.norms, "needs": "waived", "part": True, "base_blocks": self.base_blocks}
        self.source = Pre(self.dim, blocks, **how)
        self.target = TOPOLOGIES[name](self.dim, blocks, **how, options=options)
        del self.target.links
        self.target.links = []  # type: ignore[assignment]  # a plain list: the blend's links own them
        self.share = Share(self.options.start, self.options.steps)

    def link(self, place: Place) -> Link:
        """Both topologies' own, side by side."""
        share, target = Share(self.options.start, self.options.steps), self.target.link(place)
        self.target.links.append(target)
        return BlendLink(self.source.link(place), target, share)

    def open(self, x: Tensor) -> Both:
        """Both start from the embedding, as two tensors: one twice would be another graph to a compiler."""
        return self.source.open(x), self.target.open(x.view_as(x))

    def close(self, streams: Both) -> Tensor:
        """Both ends, blended."""
        return self.share.blend(self.source.close(streams[0]), self.target.close(streams[1]))

    def needs(self, place: Place) -> SublayerNeeds:
        """The other's norms, which grow in where Pre-Norm had none."""
        needs, had = self.target.needs(place), self.options.qk_norm
        kinds = {"none": ("none", "qk_head", "qk_projection", "qkv_head"), "head": ("none", "qk_head", "qkv_head")}
        if needs.attention_norm not in kinds.get(had, ("none", "qk_projection")):
            raise TopologyError(
                f"blend: qk_norm = {had!r} cannot become the norm that {self.target.name} has inside attention"
            )
        names = ("q", "k", "v", "out") if had == "none" else ("v", "out")
        return replace(needs, growing=Growth(names, self.options.start, self.options.steps))

    @property
    def init_rule(self) -> InitRule:
        """The other's."""
        return self.target.init_rule

    def map_streams(self, streams: Both, function: Callable[[Tensor], Tensor]) -> Both:
        """Each by itself."""
        return self.source.map_streams(streams[0], function), self.target.map_streams(streams[1], function)

    def summands_at_end(self, streams: Both, last: Link) -> Sum:
        """Both ends, with their shares."""
        assert isinstance(last, BlendLink)
        old = self.source.summands_at_end(streams[0], last.source).finished()
        return shared(self.share, old, self.target.summands_at_end(streams[1], last.target).finished())

    def output_norms(self, last: Link) -> list[nn.Module]:
        """Those of both ends."""
        assert isinstance(last, BlendLink)
        return self.source.output_norms(last.source) + self.target.output_norms(last.target)

    def named_streams(self, streams: Both) -> dict[str, Tensor]:
        """Pre-Norm's stream, and the other's under their own names."""
        return {"source": streams[0], **self.target.named_streams(streams[1])}


def shared(share: Share, old: Sum, new: Sum) -> Sum:
    """Two sums with the shares that they have in a blend."""
    b: Any = share().detach()
    parts = [(1 - b) * part for part in old.parts] + [b * part for part in new.parts]
    return Sum(parts, [float(1 - b) * gain for gain in old.gains] + [float(b) * gain for gain in new.gains])
