"""Single streams that are normalised on their way: Post-Norm and its kin, and Mix-LN, which is both."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from torch import Tensor, nn

from siamesenorm.residual.base import InitRule, Link, Topology
from siamesenorm.residual.depth import depth_factor
from siamesenorm.residual.drop import Keep
from siamesenorm.residual.options import Options, option
from siamesenorm.residual.places import Place
from siamesenorm.residual.pre import PreLink, RawLink
from siamesenorm.residual.summands import mean_gain


class PostStartLink(RawLink):
    """Post-Norm at the start of the next sublayer."""

    equation = "x = N x; x = x + F(x): the post-norm of one sublayer runs at the start of the next"

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """N x, as the stream and for the sublayer."""
        x = self.norm(x)
        return x, x

    def depth_powers(self) -> dict[str, float]:
        """The norm: its gains multiply each other along the stream."""
        return {"norm": 1.0}

    def read_gain(self, previous: Link | None) -> float:
        """N's."""
        return mean_gain(self.norm)


class PostEndLink(RawLink):
    """Post-Norm."""

    equation = "x = N(x + F(x))"

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def write(self, x: Tensor, output: Tensor, keep: Keep = None) -> Tensor:
        """N(x + O)."""
        return self.norm(x + self.dropped(output, keep))

    def depth_powers(self) -> dict[str, float]:
        """The norm: its gains multiply each other along the stream."""
        return {"norm": 1.0}

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
    """Post-Norm (arXiv 1706.03762)."""

    name = "post"
    about = """
    Post-Norm: ``x = N(x + F(x))``. arXiv 1706.03762.
    """
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
    """DeepNorm."""

    equation = "x = N(a x + F(x))"

    def __init__(self, norm: nn.Module, scale: float) -> None:
        super().__init__(norm)
        self.scale = depth_factor(scale)

    def write(self, x: Tensor, output: Tensor, keep: Keep = None) -> Tensor:
        """N(a x + O)."""
        return self.norm(self.scale * x + self.dropped(output, keep))


class DeepNorm(Topology):
    """DeepNorm (arXiv 2203.00555)."""

    name = "deepnorm"
    about = """
    DeepNorm, decoder-only: ``x = N(a x + F(x))``, ``a = (2L)^(1/4)``. arXiv 2203.00555.

    Value, output and FFN weights are divided by ``(8L)^(1/4)``. 2L is taken as the number of sublayers, which
    is the same for (attention, ffn) blocks and the paper's own law for blocks with cross-attention.
    """
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
        return DeepNormLink(self.norm("stream"), place.base_total**0.25)

    @property
    def init_rule(self) -> InitRule:
        """Value, output and FFN weights ÷ (8L)^(1/4); no other depth factor."""
        return InitRule.of_branches((4 * self.places[0].base_total) ** -0.25)


class KeelLink(PreLink):
    """Keel."""

    equation = "x = N(a x + F(N' x))"

    def __init__(self, norm: nn.Module, stream_norm: nn.Module, scale: float) -> None:
        super().__init__(norm)
        self.stream_norm, self.scale = stream_norm, depth_factor(scale)

    def write(self, x: Tensor, output: Tensor, keep: Keep = None) -> Tensor:
        """N(a x + O)."""
        return self.stream_norm(self.scale * x + self.dropped(output, keep))

    def depth_powers(self) -> dict[str, float]:
        """The norm: its gains multiply each other along the stream."""
        return {"stream_norm": 1.0}

    @property
    def written_norm(self) -> nn.Module:
        """N."""
        return self.stream_norm


class Keel(Topology):
    """Keel (arXiv 2601.19895)."""

    name = "keel"
    about = """
    Keel: ``x = N(2L x + F(N' x))``, block 0 Pre-Norm. arXiv 2601.19895.

    2L is taken as the number of sublayers, which is the same for (attention, ffn) blocks.
    """
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
        if place.depth < 1:
            return PreLink(self.norm("input"))
        return KeelLink(self.norm("input"), self.norm("stream"), place.base_total)


@dataclass(frozen=True)
class MixOptions(Options):
    """How much of the stack is Post-Norm."""

    post_fraction: float = option(0.25, "share of the blocks, from the first on, that are Post-Norm", low=0, high=1)


class Mix(Topology):
    """Mix-LN (arXiv 2412.13795)."""

    name = "mix"
    about = """
    Mix-LN: the first quarter of the blocks Post-Norm, the rest Pre-Norm. arXiv 2412.13795.
    """
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
        if place.block + 1 <= self.options.post_fraction * place.blocks + 1e-9:  # .29 of 100 is 28.999…
            return PostEndLink(self.norm("stream"))
        return PreLink(self.norm("input"))
