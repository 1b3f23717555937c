"""Single streams that are never normalised: Pre-Norm and its kin. What differs is how an update is made and weighed."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from siamesenorm.residual.base import InitRule, Link, SublayerNeeds, Topology
from siamesenorm.residual.depth import depth_factor
from siamesenorm.residual.drop import Keep
from siamesenorm.residual.options import Options, option
from siamesenorm.residual.places import Place
from siamesenorm.residual.summands import mean_gain


class PreLink(Link):
    """Pre-Norm."""

    equation = "x = x + F(N x)"

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Unchanged x; N x."""
        return x, self.norm(x)

    def write(self, x: Tensor, output: Tensor, keep: Keep = None) -> Tensor:
        """x + O."""
        return x + self.dropped(output, keep)

    def read_gain(self, previous: Link | None) -> float:
        """N's."""
        return mean_gain(self.norm)


class Pre(Topology):
    """Pre-Norm (arXiv 2002.04745)."""

    name = "pre"
    about = """
    Pre-Norm: ``x = x + F(N x)``, ``out = N(x)``. arXiv 2002.04745.
    """
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
    """A plain residual sum."""

    equation = "x = x + F(x): no norm of its own"

    def read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """x; x."""
        return x, x

    def write(self, x: Tensor, output: Tensor, keep: Keep = None) -> Tensor:
        """x + O."""
        return x + self.dropped(output, keep)


class SandwichLink(PreLink):
    """Sandwich-Norm."""

    equation = "x = x + N'(F(N x))"

    def __init__(self, norm: nn.Module, output_norm: nn.Module) -> None:
        super().__init__(norm)
        self.output_norm = output_norm

    def write(self, x: Tensor, output: Tensor, keep: Keep = None) -> Tensor:
        """x + N'(O); the update is dropped after its norm, which would undo a drop's rescaling."""
        return x + self.dropped(self.output_norm(output), keep)


class Sandwich(Topology):
    """Sandwich-Norm (arXiv 2105.13290)."""

    name = "sandwich"
    about = """
    Sandwich-Norm: ``x = x + N'(F(N x))``, ``out = N(x)``. arXiv 2105.13290.
    """
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
    """Peri-LN (arXiv 2502.02732)."""

    beginning = "x = N(embed)"
    name = "peri"
    about = """
    Peri-LN: Sandwich-Norm whose embedding is normalised too. arXiv 2502.02732.
    """
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
    """OLMo-2's reordered norm."""

    equation = "x = x + N(F(x))"

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def write(self, x: Tensor, output: Tensor, keep: Keep = None) -> Tensor:
        """x + N(O)."""
        return x + self.dropped(self.norm(output), keep)


class Reordered(Topology):
    """Reordered norm of OLMo-2 (arXiv 2501.00656)."""

    name = "reordered"
    about = """
    Reordered norm of OLMo-2: ``x = x + N(F(x))``, QK-norm over the whole projection. arXiv 2501.00656.
    """
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


class ScaledLink(PreLink):
    """LayerNorm-Scaling."""

    equation = "x = x + F(N(x) / sqrt(l+1))"

    def __init__(self, norm: nn.Module, scale: float) -> None:
        super().__init__(norm)
        self.scale = depth_factor(scale)

    def read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """N(x) / sqrt(l+1)."""
        return x, self.norm(x) * self.scale

    def read_gain(self, previous: Link | None) -> float:
        """N's, divided too."""
        return mean_gain(self.norm) * float(self.scale)


class Scaled(Topology):
    """LayerNorm-Scaling (arXiv 2502.05795)."""

    name = "scaled"
    about = """
    LayerNorm-Scaling: ``x = x + F(N(x) / sqrt(l+1))``. arXiv 2502.05795.
    """
    equation = "x = x + F(N(x) / sqrt(l+1))"
    end = "N x"
    arxiv = "2502.05795"
    kind = "pre"
    drawing = """
 x ──┬──────────────────────────────────(+)──▶ x
     └──▶ N ──▶ ÷ sqrt(l+1) ──▶ F ────────┘"""

    def link(self, place: Place) -> Link:
        """Deeper blocks read a smaller input."""
        return ScaledLink(self.norm("input"), (place.depth + 1) ** -0.5)


class GainLink(PreLink):
    """LayerScale."""

    equation = "x = x + g * F(N x) with a learned vector g"

    def __init__(self, norm: nn.Module, dim: int, start: float) -> None:
        super().__init__(norm)
        self.start = start
        self.gain = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def no_weight_decay(self) -> set[str]:
        """The gain: decay would pull a branch that starts small to nothing."""
        return {"gain"}

    def reset_parameters(self) -> None:
        """The gain's start value."""
        nn.init.constant_(self.gain, self.start)

    def write(self, x: Tensor, output: Tensor, keep: Keep = None) -> Tensor:
        """x + g * O."""
        return x + self.dropped(self.gain * output, keep)


@dataclass(frozen=True)
class LayerScaleOptions(Options):
    """The gain's start."""

    start: float = option(1e-4, "value every gain starts at; 1 starts as Pre-Norm", low=-1000, high=1000)


class LayerScale(Topology):
    """LayerScale (arXiv 2103.17239)."""

    name = "layerscale"
    about = """
    LayerScale: ``x = x + g * F(N x)``, g a vector that starts at 1e-4. arXiv 2103.17239.
    """
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


class ReZeroLink(RawLink):
    """ReZero."""

    equation = "x = x + a F(x) with a learned scalar a"

    def __init__(self) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.empty(1))
        self.reset_parameters()

    def no_weight_decay(self) -> set[str]:
        """The scalar: decay would hold the network at the identity it starts from."""
        return {"gain"}

    def reset_parameters(self) -> None:
        """a = 0: every block starts as the identity."""
        nn.init.zeros_(self.gain)

    def write(self, x: Tensor, output: Tensor, keep: Keep = None) -> Tensor:
        """x + a O."""
        return x + self.dropped(self.gain * output, keep)


class ReZero(Topology):
    """ReZero (arXiv 2003.04887)."""

    name = "rezero"
    about = """
    ReZero: ``x = x + a F(x)``, a = 0 at start, no norms at all. arXiv 2003.04887.
    """
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


class SubLN(Pre):
    """Sub-LN (arXiv 2210.06423)."""

    name = "subln"
    about = """
    Sub-LN (Magneto): Pre-Norm plus a norm before each output projection. arXiv 2210.06423.

    The inner norms live in the sublayers (see `needs`). Value, output and FFN weights are multiplied by
    ``sqrt(ln 2L)``, 2L taken as the number of sublayers.
    """
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
        return InitRule.of_branches(math.sqrt(math.log(max(self.places[0].base_total, 2))))
