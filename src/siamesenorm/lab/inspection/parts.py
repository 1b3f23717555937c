"""What each stream has in a sublayer's reading and in the stack's output.

Topologies with several streams add them up at two places: where a sublayer reads and at the end. A `Sum` is such a
place taken apart: one summand and one gain a stream, and what is done with their sum. A topology of your own with
several streams registers how it is taken apart::

    @taken_apart_at_read.register
    def _(link: MyLink, previous: Link | None, streams: Any) -> Sum: ...
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import singledispatch
from typing import Any

import torch
from torch import Tensor, nn

from siamesenorm.residual import Link, Topology
from siamesenorm.residual.dual import DualLink, ResidualDual
from siamesenorm.residual.flow import Streams
from siamesenorm.residual.hyper import Hyper
from siamesenorm.residual.manifold import Manifold
from siamesenorm.residual.post import PostStartLink
from siamesenorm.residual.pre import PreLink, ScaledLink
from siamesenorm.residual.rows import RowsLink
from siamesenorm.residual.siamese import PairLink, Siamese
from siamesenorm.residual.span import InnerLink


def unchanged(x: Tensor) -> Tensor:
    """x."""
    return x


@dataclass(frozen=True)
class Sum:
    """``finish(sum(parts))``, the parts in the order of the topology's named streams."""

    parts: list[Tensor]
    """(..., dim) of each stream."""
    gains: list[float]
    """Mean size of the factor that each stream comes in with: a norm's gains, a mixing weight."""
    finish: Callable[[Tensor], Tensor] = unchanged
    """What is done with the sum: a norm, or nothing."""


def mean_gain(norm: nn.Module | None, otherwise: float = 1.0) -> float:
    """Mean absolute gain of a norm, 1 for one without."""
    weight = getattr(norm, "weight", None)
    return float(weight.detach().float().abs().mean()) if isinstance(weight, Tensor) else otherwise


# Where a sublayer reads -------------------------------------------------------------------------------


@singledispatch
def taken_apart_at_read(link: Link, previous: Link | None, streams: Streams) -> Sum | None:
    """What a sublayer sees, stream by stream; None where the link has one stream or does not say.

    previous: the link before, whose norm stands before this reading where norms run at the end of a sublayer.
    streams: as they are before the read.
    """
    return None


@taken_apart_at_read.register
def _(link: PairLink, previous: Link | None, streams: Streams) -> Sum:
    assert previous is None or isinstance(previous, PairLink)
    x, y = link.x.read(streams[0])[1], link.y.read(streams[1])[1]
    before_x, before_y = (None, None) if previous is None else (previous.x, previous.y)
    gain_x, gain_y = gain_at_read(link.x, before_x), gain_at_read(link.y, before_y)
    if link.gain is not None:  # g stands where HybridNorm's attention has no norm on the stream
        x, gain_x = link.gain * x, float(link.gain.detach().float().abs().mean())
    return Sum([x, y], [gain_x, gain_y], unchanged if link.input_norm is None else link.input_norm)


@taken_apart_at_read.register
def _(link: RowsLink, previous: Link | None, streams: Tensor) -> Sum | None:
    norm = getattr(link, "norm", None)
    return None if norm is None else Sum(*_weighted(link.weights(streams), streams), norm)


@taken_apart_at_read.register
def _(link: DualLink, previous: Link | None, streams: Streams) -> Sum:
    x, d = streams
    return Sum([x, torch.zeros_like(d)], [mean_gain(None if previous is None else previous.written_norm), 0.0])


def gain_at_read(link: Link, previous: Link | None) -> float:
    """Mean absolute gain of the norm that a part's stream was last sent through before the sublayer sees it."""
    norm = link.norm if isinstance(link, (PreLink, PostStartLink)) else None
    if isinstance(link, InnerLink):
        norm = link.read_norm
    if norm is None and previous is not None:
        norm = previous.written_norm
    return mean_gain(norm) * (float(link.scale) if isinstance(link, ScaledLink) else 1.0)


# The end -----------------------------------------------------------------------------------------------


@singledispatch
def taken_apart_at_end(topology: Topology, streams: Streams) -> Sum | None:
    """The stack's output, stream by stream; None where a topology with several streams does not say."""
    if len(topology.named_streams(streams)) > 1:
        return None
    (gain,) = _end_gains(topology, topology.links[-1])
    return Sum([type(topology).close(topology, streams)], [gain])


@taken_apart_at_end.register
def _(topology: Siamese, streams: Streams) -> Sum:
    last = topology.links[-1]
    assert isinstance(last, PairLink)
    parts = [topology.x.close(streams[0]), topology.y.close(streams[1])]
    gains = _end_gains(topology.x, last.x) + _end_gains(topology.y, last.y)
    return Sum(parts, gains, unchanged if topology.final_norm is None else topology.final_norm)


@taken_apart_at_end.register
def _(topology: ResidualDual, streams: Streams) -> Sum:
    x, d = streams
    assert topology.final_norm is not None
    last = topology.links[-1]
    assert isinstance(last, DualLink)
    return Sum([x, topology.final_norm(d)], [mean_gain(last.norm), mean_gain(topology.final_norm)])


@taken_apart_at_end.register
def _(topology: Hyper, streams: Tensor) -> Sum:
    assert topology.final_norm is not None
    return Sum(*_weighted(streams.new_ones(topology.options.rate), streams), topology.final_norm)


@taken_apart_at_end.register
def _(topology: Manifold, streams: Tensor) -> Sum:
    assert topology.final_norm is not None
    rate = topology.options.rate
    weights = streams.new_full((rate,), 1 / rate) if topology.collapse is None else topology.collapse.weights(streams)
    return Sum(*_weighted(weights, streams), topology.final_norm)


def _end_gains(topology: Topology, last: Any) -> list[float]:
    norms = topology.output_norms(last)
    return [mean_gain(norms[0] if norms else None)]


def _weighted(weights: Tensor, rows: Tensor) -> tuple[list[Tensor], list[float]]:
    """Rows times their weights, (..., n) and (..., n, d), and the weights' mean sizes."""
    sizes = weights.detach().float().abs().reshape(-1, weights.shape[-1]).mean(0)
    return list((weights.unsqueeze(-1) * rows).unbind(-2)), sizes.tolist()
