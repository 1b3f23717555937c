"""Single-stream topologies: the stream is one tensor, and all that differs is where norms and scales stand."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

from siamesenorm.residual.base import InitRule, Link, Place, SublayerNeeds, Topology
from siamesenorm.residual.options import Options, option


class PreLink(Link):
    """x = x + F(N x)."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Unchanged x; N x."""
        return x, self.norm(x)

    def write(self, x: Tensor, output: Tensor) -> Tensor:
        """x + O."""
        return x + self.dropped(output)


class Pre(Topology):
    """Pre-Norm: ``x = x + F(N x)``, ``out = N(x)``. arXiv 2002.04745."""

    name = "pre"
    equation = "x = x + F(N x)"
    end = "N x"
    arxiv = "2002.04745"
    kind = "pre"
    drawing = """
 x ──┬────────────────────(+)──▶ x
     └──▶ N ──▶ F ──────────┘"""

    def link(self, place: Place) -> Link:
        """Every sublayer reads a normalised copy."""
        return PreLink(self.norm("input"))


class RawLink(Link):
    """x = x + F(x): no norm of its own."""

    def read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x; x."""
        return x, x

    def write(self, x: Tensor, output: Tensor) -> Tensor:
        """x + O."""
        return x + self.dropped(output)


class PostStartLink(RawLink):
    """x = N x; x = x + F(x): the post-norm of one sublayer runs at the start of the next."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """N x, as the stream and for the sublayer."""
        x = self.norm(x)
        return x, x


class PostEndLink(RawLink):
    """x = N(x + F(x))."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def write(self, x: Tensor, output: Tensor) -> Tensor:
        """N(x + O)."""
        return self.norm(x + self.dropped(output))

    @property
    def written_norm(self) -> nn.Module:
        """N."""
        return self.norm


@dataclass(frozen=True)
class PostOptions(Options):
    """Where the norm runs."""

    norm_at: Literal["start", "end"] = option(
        "start",
        "start: at the start of the next sublayer, with the embedding normalised and a final norm, as the "
        "official code has it; end: x = N(x + F(x)), the textbook form, with neither",
    )


class Post(Topology):
    """Post-Norm: ``x = N(x + F(x))``. arXiv 1706.03762."""

    name = "post"
    equation = "x = N(x + F(x))"
    end = "–  (norm_at=start: N x, embedding normalised)"
    arxiv = "1706.03762"
    kind = "post"
    options_class = PostOptions
    options: PostOptions
    drawing = """
 x ──▶ N ──┬──────────────(+)──▶ x      norm_at=start (default)
           └──▶ F ──────────┘

 x ──┬─────────────(+)──▶ N ──▶ x       norm_at=end
     └──▶ F ─────────┘"""

    def setup(self) -> None:
        """The textbook form ends normalised already."""
        self.has_final_norm = self.options.norm_at == "start"  # type: ignore[misc]

    def link(self, place: Place) -> Link:
        """Norm at the start or at the end of a sublayer."""
        return (PostStartLink if self.options.norm_at == "start" else PostEndLink)(self.norm("stream"))


class DeepNormLink(PostEndLink):
    """x = N(a x + F(x))."""

    def __init__(self, norm: nn.Module, scale: float) -> None:
        super().__init__(norm)
        self.scale = scale

    def write(self, x: Tensor, output: Tensor) -> Tensor:
        """N(a x + O)."""
        return self.norm(self.scale * x + self.dropped(output))


class DeepNorm(Topology):
    """DeepNorm, decoder-only: ``x = N(a x + F(x))``, ``a = (2L)^(1/4)``. arXiv 2203.00555.

    Value, output and FFN weights are divided by ``(8L)^(1/4)``. 2L is taken as the number of sublayers, which
    is the same for (attention, ffn) blocks and the paper's own law for blocks with cross-attention.
    """

    name = "deepnorm"
    equation = "x = N(a x + F(x)),  a = (2L)^(1/4)"
    end = "–"
    arxiv = "2203.00555"
    kind = "post"
    has_final_norm = False
    drawing = """
 x ──┬──▶ ·a ──────(+)──▶ N ──▶ x       a = (2L)^(1/4)
     └──▶ F ─────────┘                  value, output and FFN weights ÷ (8L)^(1/4)"""

    def link(self, place: Place) -> Link:
        """Skip scaled by a."""
        return DeepNormLink(self.norm("stream"), place.total**0.25)

    @property
    def init_rule(self) -> InitRule:
        """Value, output and FFN weights ÷ (8L)^(1/4); no other depth factor."""
        return _scaled_weights((4 * len(self.places)) ** -0.25)


def _scaled_weights(factor: float) -> InitRule:
    return InitRule(
        {"value": factor, "attention_out": factor, "ffn_in": factor, "ffn_out": factor},
        keeps_depth_factor=False,
    )


class SandwichLink(PreLink):
    """x = x + N'(F(N x))."""

    def __init__(self, norm: nn.Module, output_norm: nn.Module) -> None:
        super().__init__(norm)
        self.output_norm = output_norm

    def write(self, x: Tensor, output: Tensor) -> Tensor:
        """x + N'(O); the update is dropped after its norm, which would undo a drop's rescaling."""
        return x + self.dropped(self.output_norm(output))


class Sandwich(Topology):
    """Sandwich-Norm: ``x = x + N'(F(N x))``, ``out = N(x)``. arXiv 2105.13290."""

    name = "sandwich"
    equation = "x = x + N'(F(N x))"
    end = "N x"
    arxiv = "2105.13290"
    kind = "pre"
    drawing = """
 x ──┬──────────────────────────(+)──▶ x
     └──▶ N ──▶ F ──▶ N' ─────────┘"""

    def link(self, place: Place) -> Link:
        """A norm on either side of the sublayer."""
        return SandwichLink(self.norm("input"), self.norm("stream"))


class Peri(Sandwich):
    """Peri-LN: Sandwich-Norm whose embedding is normalised too. arXiv 2502.02732."""

    name = "peri"
    equation = "x = N(embed);  x = x + N'(F(N x))"
    arxiv = "2502.02732"
    drawing = """
 embed ──▶ N ──▶ x                      once, at the start

 x ──┬──────────────────────────(+)──▶ x
     └──▶ N ──▶ F ──▶ N' ─────────┘"""

    def setup(self) -> None:
        """The embedding's norm."""
        self.embedding_norm = self.norm("stream")

    def open(self, x: Tensor) -> Tensor:
        """N(embed)."""
        return self.embedding_norm(x)


class ReorderedLink(RawLink):
    """x = x + N(F(x))."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def write(self, x: Tensor, output: Tensor) -> Tensor:
        """x + N(O)."""
        return x + self.dropped(self.norm(output))


class Reordered(Topology):
    """Reordered norm of OLMo-2: ``x = x + N(F(x))``, QK-norm over the whole projection. arXiv 2501.00656."""

    name = "reordered"
    equation = "x = x + N(F(x))"
    end = "N x"
    arxiv = "2501.00656"
    kind = "pre"
    drawing = """
 x ──┬────────────────────(+)──▶ x
     └──▶ F ──▶ N ──────────┘           attention: norm on all of Q and of K"""

    def link(self, place: Place) -> Link:
        """Only the output is normalised."""
        return ReorderedLink(self.norm("stream"))

    def needs(self, place: Place) -> SublayerNeeds:
        """QK-norm over the whole projection."""
        return SublayerNeeds("qk_projection" if place.is_attention or place.kind == "parallel" else "none")

    @property
    def init_rule(self) -> InitRule:
        """Every weight with std .02."""
        return InitRule(std=0.02, keeps_depth_factor=False)


@dataclass(frozen=True)
class MixOptions(Options):
    """How much of the stack is Post-Norm."""

    post_fraction: float = option(0.25, "share of the blocks, from the first on, that are Post-Norm", low=0, high=1)


class Mix(Topology):
    """Mix-LN: the first quarter of the blocks Post-Norm, the rest Pre-Norm. arXiv 2412.13795."""

    name = "mix"
    equation = "l < L/4: x = N(x + F(x));  else x = x + F(N x)"
    end = "N x"
    arxiv = "2412.13795"
    kind = "mixed"
    options_class = MixOptions
    options: MixOptions
    drawing = """
 x ──┬─────────────(+)──▶ N ──▶ x       blocks 0 .. L/4 - 1
     └──▶ F ─────────┘

 x ──┬────────────────────(+)──▶ x      the others
     └──▶ N ──▶ F ──────────┘"""

    def link(self, place: Place) -> Link:
        """Post in the first blocks, Pre after them."""
        if place.block < int(self.options.post_fraction * place.blocks):
            return PostEndLink(self.norm("stream"))
        return PreLink(self.norm("input"))


class ScaledLink(PreLink):
    """x = x + F(N(x) / sqrt(l+1))."""

    def __init__(self, norm: nn.Module, scale: float) -> None:
        super().__init__(norm)
        self.scale = scale

    def read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """N(x) / sqrt(l+1)."""
        return x, self.norm(x) * self.scale


class Scaled(Topology):
    """LayerNorm-Scaling: ``x = x + F(N(x) / sqrt(l+1))``. arXiv 2502.05795."""

    name = "scaled"
    equation = "x = x + F(N(x) / sqrt(l+1))"
    end = "N x"
    arxiv = "2502.05795"
    kind = "pre"
    drawing = """
 x ──┬──────────────────────────────────(+)──▶ x
     └──▶ N ──▶ ÷ sqrt(l+1) ──▶ F ────────┘"""

    def link(self, place: Place) -> Link:
        """Deeper blocks read a smaller input."""
        return ScaledLink(self.norm("input"), (place.block + 1) ** -0.5)


class KeelLink(PreLink):
    """x = N(a x + F(N' x))."""

    def __init__(self, norm: nn.Module, stream_norm: nn.Module, scale: float) -> None:
        super().__init__(norm)
        self.stream_norm, self.scale = stream_norm, scale

    def write(self, x: Tensor, output: Tensor) -> Tensor:
        """N(a x + O)."""
        return self.stream_norm(self.scale * x + self.dropped(output))

    @property
    def written_norm(self) -> nn.Module:
        """N."""
        return self.stream_norm


class Keel(Topology):
    """Keel: ``x = N(2L x + F(N' x))``, block 0 Pre-Norm. arXiv 2601.19895.

    2L is taken as the number of sublayers, which is the same for (attention, ffn) blocks.
    """

    name = "keel"
    equation = "x = N(2L x + F(N' x));  block 0: x = x + F(N' x)"
    end = "–"
    arxiv = "2601.19895"
    kind = "post"
    has_final_norm = False
    drawing = """
 x ──┬──▶ ·2L ──────────────(+)──▶ N ──▶ x     blocks 1 .. L-1
     └──▶ N' ──▶ F ───────────┘

 x ──┬─────────────────────(+)──▶ x            block 0
     └──▶ N' ──▶ F ──────────┘"""

    def link(self, place: Place) -> Link:
        """Pre-Norm first, then the highway-like skip."""
        if place.block == 0:
            return PreLink(self.norm("input"))
        return KeelLink(self.norm("input"), self.norm("stream"), float(place.total))


class GainLink(PreLink):
    """x = x + g * F(N x) with a learned vector g."""

    def __init__(self, norm: nn.Module, dim: int, start: float) -> None:
        super().__init__(norm)
        self.start = start
        self.gain = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """The gain's start value."""
        nn.init.constant_(self.gain, self.start)

    def write(self, x: Tensor, output: Tensor) -> Tensor:
        """x + g * O."""
        return x + self.dropped(self.gain * output)


@dataclass(frozen=True)
class LayerScaleOptions(Options):
    """The gain's start."""

    start: float = option(1e-4, "value every gain starts at; 1 starts as Pre-Norm")


class LayerScale(Topology):
    """LayerScale: ``x = x + g * F(N x)``, g a vector that starts at 1e-4. arXiv 2103.17239."""

    name = "layerscale"
    equation = "x = x + g * F(N x),  g = 1e-4 at start"
    end = "N x"
    arxiv = "2103.17239"
    kind = "pre"
    options_class = LayerScaleOptions
    options: LayerScaleOptions
    drawing = """
 x ──┬──────────────────────────(+)──▶ x
     └──▶ N ──▶ F ──▶ *g ─────────┘     g: learned vector"""

    def link(self, place: Place) -> Link:
        """A learned gain on every update."""
        return GainLink(self.norm("input"), self.dim, self.options.start)

    def no_weight_decay(self) -> set[str]:
        """The gains: decay would pull a branch that starts small to nothing."""
        return {name for name, _ in self.named_parameters() if name.endswith(".gain")}


class ReZeroLink(RawLink):
    """x = x + a F(x) with a learned scalar a."""

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """a = 0: every block starts as the identity."""
        nn.init.zeros_(self.gain)

    def write(self, x: Tensor, output: Tensor) -> Tensor:
        """x + a O."""
        return x + self.dropped(self.gain * output)


class ReZero(Topology):
    """ReZero: ``x = x + a F(x)``, a = 0 at start, no norms at all. arXiv 2003.04887."""

    name = "rezero"
    equation = "x = x + a F(x),  a = 0 at start"
    end = "–"
    arxiv = "2003.04887"
    kind = "pre"
    has_final_norm = False
    drawing = """
 x ──┬────────────────────(+)──▶ x
     └──▶ F ──▶ ·a ─────────┘           a: learned scalar"""

    def link(self, place: Place) -> Link:
        """One scalar a sublayer."""
        return ReZeroLink()

    def no_weight_decay(self) -> set[str]:
        """The scalars: decay would hold the network at the identity it starts from."""
        return {name for name, _ in self.named_parameters()}


class SubLN(Pre):
    """Sub-LN (Magneto): Pre-Norm plus a norm before each output projection. arXiv 2210.06423.

    The inner norms live in the sublayers (see `needs`). Value, output and FFN weights are multiplied by
    ``sqrt(ln 2L)``, 2L taken as the number of sublayers.
    """

    name = "subln"
    equation = "x = x + W_out N'(F_in(N x))"
    arxiv = "2210.06423"
    drawing = """
 x ──┬──────────────────────────────────────(+)──▶ x
     └──▶ N ──▶ F_in ──▶ N' ──▶ W_out ────────┘      N' inside the sublayer"""

    def needs(self, place: Place) -> SublayerNeeds:
        """A norm before the output projection."""
        return SublayerNeeds(output_norm=True)

    @property
    def init_rule(self) -> InitRule:
        """Value, output and FFN weights × sqrt(ln 2L); no other depth factor."""
        return _scaled_weights(math.sqrt(math.log(max(len(self.places), 2))))
