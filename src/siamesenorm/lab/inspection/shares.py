"""Gain shares: how much of each stream is in what a sublayer sees, and in the stack's output."""

from __future__ import annotations

from siamesenorm.lab.inspection.activity import rms
from siamesenorm.lab.inspection.probe import Probe, StreamView
from siamesenorm.lab.inspection.result import Mixture
from siamesenorm.residual import Link, Place
from siamesenorm.residual.flow import Streams
from siamesenorm.residual.summands import Sum


class Shares(Probe):
    """Gains and contributions of the streams at every read and at the end."""

    def __init__(self, view: StreamView) -> None:
        super().__init__(view)
        self.reads: list[Mixture] = []
        self.fusion = Mixture()

    def at_read(self, place: Place, link: Link, previous: Link | None, streams: Streams) -> None:
        """What the link says."""
        self.reads.append(self.mixture(streams, link.summands(streams, previous)))

    def at_end(self, streams: Streams) -> None:
        """The final fusion."""
        topology = self.view.topology
        last = topology.links[-1]
        assert isinstance(last, Link)
        self.fusion = self.mixture(streams, topology.summands_at_end(streams, last))

    def mixture(self, streams: Streams, found: Sum) -> Mixture:
        """Means, and shares of their sums; a stream that is alone has all."""
        names = tuple(self.view.topology.named_streams(streams))
        if len(found.parts) != len(names):  # a topology of one's own that does not say it
            return Mixture()
        if len(names) == 1:
            return Mixture(gains={names[0]: found.gains[0]}, gain_shares={names[0]: 1.0}, contributions={names[0]: 1.0})
        sizes = [rms(self.view.select(part)) for part in found.parts]
        return Mixture(
            gains=dict(zip(names, found.gains, strict=True)),
            gain_shares=dict(zip(names, shares(found.gains), strict=True)),
            contributions=dict(zip(names, shares(sizes), strict=True)),
        )


def shares(sizes: list[float]) -> list[float]:
    """Parts of their sum, NaN where that is 0."""
    total = sum(sizes)
    return [size / total if total else float("nan") for size in sizes]
