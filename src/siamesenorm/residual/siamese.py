"""SiameseNorm: two coupled streams, one Post-Norm-like and one Pre-Norm-like, around shared sublayers.

Each stream is a single-stream topology of its own (`x` and `y`); the pair adds what they see and gives both the
same output. The paper's forms are three choices of the parts::

    plain        x = post (norm at the end)      y = pre      no N_in, no depth scaling, no N_out
    post_pre     x = post (norm at the start)    y = pre      N_in, c_l = sqrt(2(l+1)), N_out
    hybrid_pre   x = hybrid                      y = pre      the same; attention has g * X instead of N_in
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from siamesenorm.errors import TopologyError
from siamesenorm.residual.base import InitRule, Link, Step, SublayerNeeds, Topology
from siamesenorm.residual.depth import DEPTH_SCALES, DepthScaling, depth_factor
from siamesenorm.residual.drop import Keep
from siamesenorm.residual.flow import Streams
from siamesenorm.residual.hooks import has_hooks
from siamesenorm.residual.kernels.eager import runs_eager
from siamesenorm.residual.kernels.siamese_step import ABSENT, LAYER, RMS, siamese_step, takes
from siamesenorm.residual.norms import LayerNorm, Norms, RMSNorm
from siamesenorm.residual.options import Options, option
from siamesenorm.residual.places import Place, kinds_of
from siamesenorm.residual.post import PostEndLink, PostStartLink
from siamesenorm.residual.pre import PreLink, RawLink
from siamesenorm.residual.summands import Sum

StreamPair = tuple[Streams, Streams]


@dataclass(frozen=True)
class Form:
    """The parts and settings that a named form stands for."""

    x: str
    y: str
    input_norm: bool
    depth_scaling: DepthScaling
    final_norm: bool


FORMS = {
    "post_pre": Form("post", "pre", True, "sqrt(2(l+1))", True),
    "plain": Form("post:norm_at=end", "pre", False, "none", False),
    "hybrid_pre": Form("hybrid", "pre", True, "sqrt(2(l+1))", True),
}


@dataclass(frozen=True)
class SiameseOptions(Options):
    """The form, and what of it is changed."""

    form: Literal["post_pre", "plain", "hybrid_pre"] = option(
        "post_pre",
        "post_pre: the official code's; plain: the paper's Algorithm 1; hybrid_pre: the paper's best LM",
    )
    x: str | None = option(None, "topology of the first stream, of the post kind; default: the form's")
    y: str | None = option(None, "topology of the second stream, of the pre kind; default: the form's")
    input_norm: bool | None = option(
        None, "normalise the sum that the sublayer reads (N_in); default: on, off in the plain form"
    )
    depth_scaling: DepthScaling | None = option(
        None, "c_l by which X receives its update divided; default: sqrt(2(l+1)), none in the plain form"
    )
    final_norm: bool | None = option(None, "normalise the final sum (N_out); default: on, off in the plain form")


class PairLink(Link):
    """A sublayer shared by two streams."""

    equation = "O = F(N_in(read_x(X) + read_y(Y)));  X = write_x(X, O/c);  Y = write_y(Y, O)"

    def __init__(
        self, x: Link, y: Link, input_norm: nn.Module | None, gain_dim: int | None, depth_scale: float
    ) -> None:
        super().__init__()
        self.x, self.y, self.input_norm = x, y, input_norm
        self.gain = None if gain_dim is None else nn.Parameter(torch.empty(gain_dim))
        self.scale = depth_factor(1 / depth_scale)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """g = 1."""
        if self.gain is not None:
            nn.init.ones_(self.gain)

    def read(self, streams: StreamPair) -> tuple[StreamPair, Tensor]:
        """N_in(g * X + N_Y(Y)), written with the modules that compute them."""
        X, seen_x = self.x(streams[0])
        Y, seen_y = self.y(streams[1])
        seen = (seen_x if self.gain is None else self.gain * seen_x) + seen_y
        return (X, Y), seen if self.input_norm is None else self.input_norm(seen)

    def write(self, streams: StreamPair, output: Tensor, keep: Keep = None) -> StreamPair:
        """One output, and one draw of dropout, for both streams."""
        keep = self.draw(output) if keep is None else keep
        return self.x.write(streams[0], output * self.scale, keep), self.y.write(streams[1], output, keep)

    def summands(self, streams: StreamPair, previous: Link | None) -> Sum:
        """g * X and the parts of N_Y(Y), then N_in."""
        before = (previous.x, previous.y) if isinstance(previous, PairLink) else (None, None)
        x = self.x.summands(streams[0], before[0]).finished()
        y = self.y.summands(streams[1], before[1]).finished()
        if self.gain is not None:  # g stands where HybridNorm's attention has no norm on the stream
            x = Sum([self.gain * part for part in x.parts], [float(self.gain.detach().float().abs().mean())])
        return Sum(x.parts + y.parts, x.gains + y.gains, self.input_norm)


class Siamese(Topology):
    """SiameseNorm (arXiv 2602.08064)."""

    name = "siamese"
    about = """
    SiameseNorm: ``O = F(N_in(N_X(X) + N_Y(Y)))``, both streams receive O, X divided by c_l. arXiv 2602.08064.

    ``out = N_out(N_Xf(X) + N_Yf(Y))``. Where X is a HybridNorm stream, attention reads ``g * X + N_Y(Y)`` with a
    learned vector g and without N_in, since it normalises its queries, keys and values itself.
    """
    equation = "X = N_X X;  O = F(N_in(X + N_Y Y));  X = X + O/c_l;  Y = Y + O"
    beginning = "X = Y = embed"
    end = "N_out(N_Xf X + N_Yf Y)"
    arxiv = "2602.08064"
    streams = "2"
    kind = "several"
    options_class = SiameseOptions
    options: SiameseOptions
    drawing = """
 Y ──┬─────────────────────────────────(+)──▶ Y        Pre-Norm-like: never normalised
     └──▶ N_Y ──┐                       │
               (+)──▶ N_in ──▶ F ──▶ O ─┤
           ┌────┘                       ▼ ÷ c_l
 X ──▶ N_X ┴───────────────────────────(+)──▶ X        Post-Norm-like: normalised at every sublayer

 start: X = Y = embed        end: N_out(N_Xf(X) + N_Yf(Y))        c_l = sqrt(2(l+1))

 form=plain       N_X after the addition, no N_in, no c_l, out = X + N_Yf(Y)
 form=hybrid_pre  attention reads g * X + N_Y(Y) and norms Q, K, V itself; N_X and N_in at the FFN"""

    def setup(self) -> None:
        """Resolve the form and make the parts' starts and ends."""
        from siamesenorm.residual.registry import create_part  # the registry imports this module

        chosen, form = self.options, FORMS[self.options.form]
        self.input_norm = form.input_norm if chosen.input_norm is None else chosen.input_norm
        self.depth_scaling = chosen.depth_scaling or form.depth_scaling
        self.has_final_norm = form.final_norm if chosen.final_norm is None else chosen.final_norm  # type: ignore[misc]
        stream_norms = Norms(self.norms.stream, self.norms.stream, self.norms.stream)
        blocks = kinds_of(self.places)
        base = self.base_blocks
        self.x = create_part("x", chosen.x or form.x, "post", self.dim, blocks, stream_norms, base)
        self.y = create_part("y", chosen.y or form.y, "pre", self.dim, blocks, stream_norms, base)
        self._check_parts_agree()

    def _check_parts_agree(self) -> None:
        """There is one set of sublayer weights, so at most one part may say how it is made."""
        both = f"{self.name}: x={self.x.name} and y={self.y.name}"
        if not self.x.init_rule.is_neutral and not self.y.init_rule.is_neutral:
            raise TopologyError(f"{both} both set the initial weights of the shared sublayers; only one may")
        for place in self.places:
            norms = {part.needs(place).attention_norm for part in (self.x, self.y)} - {"none"}
            if len(norms) > 1:
                raise TopologyError(f"{both} ask the shared attention for different norms: {', '.join(sorted(norms))}")

    def link(self, place: Place) -> Link:
        """The parts' own links, side by side."""
        x, y = self.x.link(place), self.y.link(place)
        reads_raw = type(x) is RawLink  # HybridNorm's attention: its norms on Q, K and V do the work of N_in
        input_norm = self.norm("input") if self.input_norm and not reads_raw else None
        scale = DEPTH_SCALES[self.depth_scaling](place.depth)
        return PairLink(x, y, input_norm, self.dim if reads_raw else None, scale)

    def open(self, x: Tensor) -> StreamPair:
        """Both streams start from the embedding, as two tensors: one twice would be another graph to a compiler."""
        return self.x.open(x), self.y.open(x.view_as(x))

    def close(self, streams: StreamPair) -> Tensor:
        """N_out(N_Xf(X) + N_Yf(Y)), written with the modules that compute them."""
        out = self.x.close(streams[0]) + self.y.close(streams[1])
        return out if self.final_norm is None else self.final_norm(out)

    def map_streams(self, streams: StreamPair, function: Callable[[Tensor], Tensor]) -> StreamPair:
        """Each part by itself."""
        return self.x.map_streams(streams[0], function), self.y.map_streams(streams[1], function)

    def summands_at_end(self, streams: StreamPair, last: Link) -> Sum:
        """The parts' own ends, then N_out."""
        assert isinstance(last, PairLink)
        x = self.x.summands_at_end(streams[0], last.x).finished()
        y = self.y.summands_at_end(streams[1], last.y).finished()
        return Sum(x.parts + y.parts, x.gains + y.gains, self.final_norm)

    def needs(self, place: Place) -> SublayerNeeds:
        """What either part needs."""
        x, y = self.x.needs(place), self.y.needs(place)
        norm = x.attention_norm if x.attention_norm != "none" else y.attention_norm
        return SublayerNeeds(norm, x.output_norm or y.output_norm)

    @property
    def init_rule(self) -> InitRule:
        """The rule of the part that has one."""
        return self.y.init_rule if self.x.init_rule.is_neutral else self.x.init_rule

    def output_norms(self, last: Link) -> list[nn.Module]:
        """N_out, or the parts' own where the sum is not normalised."""
        assert isinstance(last, PairLink)
        if self.final_norm is not None:
            return [self.final_norm]
        return self.x.output_norms(last.x) + self.y.output_norms(last.y)

    def named_streams(self, streams: StreamPair) -> dict[str, Tensor]:
        """The Post-Norm-like x and the Pre-Norm-like y; of a part with several streams each, as y.name."""
        (x,), y = self.x.named_streams(streams[0]).values(), self.y.named_streams(streams[1])
        return {"x": x} | {"y" if list(y) == ["x"] else f"y.{name}": stream for name, stream in y.items()}

    def step(self, last: Link | None, following: Link) -> Step:
        """Fused where the parts are the paper's: post or hybrid with pre, and our own norms."""
        assert isinstance(last, PairLink | None)
        assert isinstance(following, PairLink)
        return (FusedStep if self.fused and FusedStep.fits(last, following) else Step)(last, following)


class FusedStep(Step):
    """Both streams written and read by one operator, wherever that may run and nobody looks in between.

    ``X1 = X + c O; Y' = Y + O; X' = N_X(X1); h = N_in(g * X' + N_Y(Y'))``.
    """

    last: PairLink | None
    following: PairLink

    def __init__(self, last: PairLink | None, following: PairLink) -> None:
        super().__init__(last, following)
        self.norms = self._norms(last, following)
        kinds = {type(None): ABSENT, RMSNorm: RMS, LayerNorm: LAYER}
        self.kinds = [kinds[type(norm)] for norm in self.norms]
        self.writing = () if last is None else (last, last.x, last.y)
        self.reading = following, following.x, following.y
        self.held = [*self._held(following), *(() if last is None else self._held(last))]

    @staticmethod
    def fits(last: PairLink | None, following: PairLink) -> bool:
        """Whether the parts are such that the operator says the same as `write` and `read`."""
        links = (following,) if last is None else (last, following)
        if not {type(link.x) for link in links} <= {PostStartLink, PostEndLink, RawLink}:
            return False
        if type(links[0].x) is PostEndLink and type(following.x) is PostStartLink:
            return False
        if any(type(link.y) is not PreLink for link in links):
            return False
        return all(type(norm) in (RMSNorm, LayerNorm, type(None)) for norm in FusedStep._norms(last, following))

    @staticmethod
    def _norms(last: PairLink | None, following: PairLink) -> tuple[Any, Any, Any]:
        """N_X, N_Y and N_in; None for one that is not there."""
        norm_x = None
        if type(following.x) is PostStartLink:
            norm_x = following.x.norm
        elif last is not None and type(last.x) is PostEndLink:
            norm_x = last.x.norm
        return norm_x, following.y.norm, following.input_norm

    def __call__(
        self, streams: StreamPair, output: Tensor | None = None, gate: Tensor | None = None
    ) -> tuple[StreamPair, Tensor]:
        """The operator, or the plain form."""
        x, y = streams
        parameters: list[Any] = [
            parameter
            for norm in self.norms
            for parameter in ((None, None) if norm is None else (norm.weight, norm.bias))
        ]
        parameters.append(self.following.gain)
        ordinary = runs_eager(x, y, output, gate, *parameters)
        if not ordinary or not takes(x, y, output, parameters, gate) or self.seen():
            return super().__call__(streams, output, gate)
        scale = 0.0
        if self.last is not None:
            assert output is not None
            output, scale = self.last.dropped(output, self.last.draw(output, gate)), float(self.last.scale)
        eps = [0.0 if norm is None else norm.eps for norm in self.norms]
        x, y, h = siamese_step(x, y, output, scale, tuple(parameters), self.kinds, eps)
        return (x, y), h

    @staticmethod
    def _held(pair: PairLink) -> list[tuple[dict[str, Any], str, nn.Module | None, type]]:
        """What a pair and its parts are made of: dictionaries of modules, names in them, who is there and its class."""
        links: tuple[Any, ...] = pair, pair.x, pair.y
        names = [("x", "y", "input_norm"), ("norm",), ("norm",)]
        return [
            (link._modules, name, link._modules.get(name), type(link._modules.get(name)))
            for link, here in zip(links, names, strict=True)
            for name in here
        ]

    def seen(self) -> bool:
        """Whether a norm or a link that the operator would bypass has hooks or was exchanged."""
        for modules, name, module, kind in self.held:
            if modules.get(name) is not module or type(module) is not kind:
                return True
        for link in self.writing:
            if "write" in link.__dict__:
                return True
        for link in self.reading:
            if "read" in link.__dict__:
                return True
        return has_hooks(*self.norms, *self.reading)
