"""How large streams, updates and single activations are."""

from __future__ import annotations

import torch
from torch import Tensor

from siamesenorm.lab.inspection.probe import Probe, wide
from siamesenorm.lab.inspection.result import ActivationPeak
from siamesenorm.residual import Link, Place
from siamesenorm.residual.drop import Keep
from siamesenorm.residual.flow import Streams

MASSIVE, MASSIVE_MEDIANS = 100.0, 1000.0
"""Size and multiple of the median from which an activation is massive (arXiv 2402.17762)."""
PLACES = 3
"""Features and tokens named of each depth."""


def rms(x: Tensor) -> float:
    """Root mean square of all entries."""
    return float(wide(x).square().mean().sqrt())


class Magnitude(Probe):
    """rms of every stream at every depth."""

    def at_depth(self, depth: int, streams: Streams) -> None:
        """One number a stream."""
        for name, rows in self.view.rows(streams).items():
            self.series.put(name, depth, rms(rows))


class Peaks(Probe):
    """The largest activations of every stream at every depth."""

    def at_depth(self, depth: int, streams: Streams) -> None:
        """Sizes and places."""
        for name, rows in self.view.rows(streams).items():
            self.series.put(name, depth, self.peak(rows.float().abs()))

    def peak(self, sizes: Tensor) -> ActivationPeak:
        """Of |activations| (tokens, dim)."""
        largest, median = float(sizes.max()), float(sizes.median())
        massive = int((sizes > max(MASSIVE, MASSIVE_MEDIANS * median)).sum())
        dims = sizes.amax(0).topk(min(PLACES, sizes.shape[1])).indices
        tokens = sizes.amax(1).topk(min(PLACES, sizes.shape[0])).indices
        places = tuple(tuple(place) for place in self.view.places(tokens).tolist())
        return ActivationPeak(largest=largest, median=median, massive=massive, dims=tuple(dims.tolist()), tokens=places)


class Updates(Probe):
    """What a sublayer's output changes in every stream, against the stream itself.

    The change is write(streams, O) - write(streams, 0) and the stream is write(streams, 0), so that scales, gains and
    mixing weights on the way count. Where a write adds, this is |O| / |stream|; where it ends with a norm, the change
    is seen behind the norm.
    """

    def at_write(self, place: Place, link: Link, before: Streams, output: Tensor, keep: Keep, streams: Streams) -> None:
        """One ratio a stream; none of a stream that the output alone makes."""
        kept = self.view.rows(type(link).write(link, before, torch.zeros_like(output)))
        for name, rows in self.view.rows(streams).items():
            size = rms(kept[name])
            ratio = rms(wide(rows) - wide(kept[name])) / size if size else float("nan")
            self.series.put(name, place.index, ratio)
