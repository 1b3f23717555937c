"""Attention Residuals: every sublayer reads a softmax mixture of what sublayers before it have put out.

The streams are a tuple of sources, oldest first, each with 1/rms beside it, so that both are made once: the number
of sources grows with depth. What is mixed are outputs (or sums of a group's outputs), not the cumulative states.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from siamesenorm.residual.base import Link, Topology
from siamesenorm.residual.drop import Keep
from siamesenorm.residual.norms import inverse_rms
from siamesenorm.residual.options import Options, option
from siamesenorm.residual.places import Place
from siamesenorm.residual.precision import widened, without_autocast
from siamesenorm.residual.summands import Sum

NormedSource = tuple[Tensor, Tensor]
"""A vector (..., d) and 1/rms of it (..., 1)."""
NormedSources = tuple[NormedSource, ...]
GROUPS = 8
"""About so many groups a stack has where their size is not given."""


def source(values: Tensor, eps: float) -> NormedSource:
    """A vector with its 1/rms."""
    with without_autocast(values):
        return values, inverse_rms(widened(values), eps)


class DepthAttention(nn.Module):
    """sum_j softmax_j(q · (g * n(v_j))) v_j: keys are normed, values are not. summed: times the number of sources."""

    def __init__(self, dim: int, summed: bool = False) -> None:
        super().__init__()
        self.summed = summed
        self.query = nn.Parameter(torch.empty(dim))
        self.key_gain = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def no_weight_decay(self) -> set[str]:
        """The query, whose zero is the plain mean, and the keys' gain."""
        return {"query", "key_gain"}

    def width_sums(self) -> set[str]:
        """The query, whose product with a source is summed."""
        return {"query"}

    def reset_parameters(self) -> None:
        """q = 0, g = 1: the mean of all sources, Pre-Norm's stream up to a scale; summed, that stream itself."""
        nn.init.zeros_(self.query)
        nn.init.ones_(self.key_gain)

    def weights(self, sources: NormedSources) -> Tensor:
        """The softmax over the sources: (..., number of sources); summed, it adds up to their number."""
        first = sources[0][0]
        with without_autocast(first):
            wide = widened(first).dtype
            direction = (self.query * self.key_gain).to(wide)
            logits = [torch.linalg.vecdot(v.to(wide), direction).unsqueeze(-1) * scale for v, scale in sources]
            weights = torch.cat(logits, -1).softmax(-1)
            return weights * len(sources) if self.summed else weights

    def forward(self, sources: NormedSources) -> Tensor:
        """The mixture, without a stack of the sources."""
        weights = self.weights(sources).to(sources[0][0].dtype)
        mixed = weights[..., :1] * sources[0][0]
        for j, (values, _) in enumerate(sources[1:], 1):
            mixed = torch.addcmul(mixed, weights[..., j : j + 1], values)
        return mixed


class FirstLink(Link):
    """The first sublayer of Attention Residuals, which has one source to read."""

    equation = "h = v_0, the one source there is;  a new source v = F(N h)"

    def __init__(self, norm: nn.Module, eps: float) -> None:
        super().__init__()
        self.norm, self.eps = norm, eps

    def read(self, sources: NormedSources) -> tuple[NormedSources, Tensor]:
        """Unchanged sources; N of the embedding."""
        return sources, self.norm(sources[0][0])

    def summands(self, sources: NormedSources, previous: Link | None) -> Sum:
        """The embedding, then N."""
        return Sum([sources[0][0]], [1.0], self.norm)

    def write(self, sources: NormedSources, output: Tensor, keep: Keep = None) -> NormedSources:
        """The output as a source of its own."""
        update = self.dropped(output, keep).to(sources[0][0].dtype)
        return *sources, source(update, self.eps)


class AttentionResidualLink(Link):
    """A sublayer whose output joins the last source."""

    equation = "h = sum_j softmax_j(q · (g * n(v_j))) v_j;  the last v_j = v_j + F(N h)"

    def __init__(self, norm: nn.Module, dim: int, eps: float, summed: bool = False) -> None:
        super().__init__()
        self.norm, self.eps = norm, eps
        self.mix = DepthAttention(dim, summed)

    def read(self, sources: NormedSources) -> tuple[NormedSources, Tensor]:
        """Unchanged sources; N of their mixture."""
        return sources, self.norm(self.mix(sources))

    def write(self, sources: NormedSources, output: Tensor, keep: Keep = None) -> NormedSources:
        """The output added to the group's sum."""
        *others, (summed, _) = sources
        return *others, source(summed + self.dropped(output, keep), self.eps)

    def summands(self, sources: NormedSources, previous: Link | None) -> Sum:
        """The weighed sources, then N."""
        return Sum.weighed(self.mix.weights(sources), [values for values, _ in sources], self.norm)


class AppendingLink(AttentionResidualLink):
    """A sublayer whose output is a new source."""

    equation = "h = sum_j softmax_j(q · (g * n(v_j))) v_j;  a new source v = F(N h)"

    write = FirstLink.write


@dataclass(frozen=True)
class AttentionResidualOptions(Options):
    """The size of a group, and the scale of the mixture."""

    blocks: int | None = option(
        None,
        "blocks of a group whose outputs are summed (Kimi K3: 12); 0: every output is a source of its own (full); "
        "default: about eight groups",
        low=0,
        high=100000,
    )
    sum: bool = option(
        False,
        "the mixture times the number of sources: it starts as the sum of all, Pre-Norm's own stream, whatever eps is "
        "(grafts; published: false)",
    )


class AttentionResidual(Topology):
    """Attention Residuals (arXiv 2603.15031)."""

    name = "attnres"
    about = """
    Attention Residuals: ``h = sum_j softmax_j(q · (g * n(v_j))) v_j`` over the sources before. arXiv 2603.15031.

    Sources are the embedding and the sums of groups of outputs (as Kimi K3 runs it), or with blocks=0 every output.
    At the start, q = 0, it is Pre-Norm: the mean of all sources is its stream up to a scale, which the norm ignores,
    but for its eps; sum=true takes the scale away too [not published].
    """
    equation = "h = sum_j softmax_j(q · (g * n(v_j))) v_j;  v_last = v_last + F(N h), a new one a group"
    beginning = "one source, the embedding"
    end = "N(the same mixture)"
    arxiv = "2603.15031"
    streams = "grows"
    kind = "pre"
    options_class = AttentionResidualOptions
    options: AttentionResidualOptions
    drawing = """
 v_0 = embed   v_1   v_2  …  v_last      sums of outputs, a new one every group of blocks
   └─────┴──────┴──────┴──────┘
        softmax_j(q · (g * n(v_j)))  ──▶ N ──▶ F ──▶ + into v_last, or a new one

 start: one source, embed        end: N(the same mixture, its own q and g)"""

    def setup(self) -> None:
        """The size of a group, and the last mixture."""
        chosen = self.options.blocks
        blocks = self.places[0].blocks
        base = self.base_blocks or blocks
        # As many groups as the base stack has: sources that grew in number would weigh less each.
        self.blocks = max(1, round(-(-base // GROUPS) * blocks / base)) if chosen is None else chosen
        self.mix = DepthAttention(self.dim, self.options.sum)

    def link(self, place: Place) -> Link:
        """Sublayers that begin a group append, others add."""
        if place.index == 0:
            return FirstLink(self.norm("input"), self.norms.eps)
        begins = not self.blocks or (place.position == 0 and place.block % self.blocks == 0)
        kind = AppendingLink if begins else AttentionResidualLink
        return kind(self.norm("input"), self.dim, self.norms.eps, self.options.sum)

    def open(self, x: Tensor) -> NormedSources:
        """One source, the embedding."""
        return (source(x, self.norms.eps),)

    def close(self, streams: NormedSources) -> Tensor:
        """N of the last mixture."""
        return super().close(self.mix(streams))

    def named_streams(self, streams: NormedSources) -> dict[str, Tensor]:
        """One name a source."""
        return {f"v{j}": values for j, (values, _) in enumerate(streams)}

    def map_streams(self, streams: NormedSources, function: Callable[[Tensor], Tensor]) -> NormedSources:
        """Every source replaced, its 1/rms made anew."""
        return tuple(source(function(values), self.norms.eps) for values, _ in streams)

    def summands_at_end(self, streams: NormedSources, last: Link) -> Sum:
        """The weighed sources, then N."""
        return Sum.weighed(self.mix.weights(streams), [values for values, _ in streams], self.final_norm)
