"""Gain shares: how much of each stream is in what a sublayer sees, and in the stack's output."""

from __future__ import annotations

from siamesenorm.lab.inspection.activity import rms
from siamesenorm.lab.inspection.parts import Sum, taken_apart_at_end, taken_apart_at_read
from siamesenorm.lab.inspection.probe import Probe, Sight
from siamesenorm.lab.inspection.result import Mixture
from siamesenorm.residual import Link, Place
from siamesenorm.residual.flow import Streams


class Shares(Probe):
    """Gains and contributions of the streams at every read and at the end."""

    def __init__(self, sight: Sight) -> None:
        super().__init__(sight)
        self.reads: list[Mixture] = []
        self.fusion = Mixture()

    def at_read(self, place: Place, link: Link, previous: Link | None, streams: Streams) -> None:
        """A stream that is alone has all."""
        found = taken_apart_at_read(link, previous, streams)
        if found is None and len(self.sight.names) == 1:
            (name,) = self.sight.names
            self.reads.append(Mixture(gain_shares={name: 1.0}, contributions={name: 1.0}))
        else:
            self.reads.append(Mixture() if found is None else self.mixture(found))

    def at_end(self, streams: Streams) -> None:
        """The final fusion."""
        found = taken_apart_at_end(self.sight.topology, streams)
        if found is not None:
            self.fusion = self.mixture(found)

    def mixture(self, found: Sum) -> Mixture:
        """Means, and shares of their sums."""
        sizes = [rms(self.sight.select(part)) for part in found.parts]
        names = self.sight.names
        return Mixture(
            gains=dict(zip(names, found.gains, strict=True)),
            gain_shares=dict(zip(names, shares(found.gains), strict=True)),
            contributions=dict(zip(names, shares(sizes), strict=True)),
        )


def shares(sizes: list[float]) -> list[float]:
    """Parts of their sum, NaN where that is 0."""
    total = sum(sizes)
    return [size / total if total else float("nan") for size in sizes]
