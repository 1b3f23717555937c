"""Single streams whose skip is weighed as well as the update: by depth (Beam), by channel (Muse Spark, ZAYA)."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from siamesenorm.residual.base import Link, Topology
from siamesenorm.residual.depth import depth_factor
from siamesenorm.residual.drop import Keep
from siamesenorm.residual.options import Options, option
from siamesenorm.residual.places import Place
from siamesenorm.residual.pre import PreLink, SandwichLink
from siamesenorm.residual.precision import widened


class BeamLink(SandwichLink):
    """Beam's depth-scaled sandwich."""

    equation = "x = sqrt((k-1)/k) x + N'(F(N x)) / sqrt(k),  k = i + 2"

    def __init__(self, norm: nn.Module, output_norm: nn.Module, index: int, step: float = 1.0) -> None:
        super().__init__(norm, output_norm)
        k = 1 + step * (index + 1)  # parts of a stream to which every sublayer before has added `step` of one
        self.skip, self.scale = depth_factor(((k - step) / k) ** 0.5), depth_factor(k**-0.5)

    def write(self, x: Tensor, output: Tensor, keep: Keep = None) -> Tensor:
        """The stream keeps its size: k - 1 parts of it and one of the update."""
        return x * self.skip + self.dropped(self.output_norm(output) * self.scale, keep)


class Beam(Topology):
    """The depth-scaled sandwich of Reflection's Beam-1.0."""

    name = "beam"
    about = """
    The depth-scaled sandwich of Reflection's Beam-1.0: the function of `sandwich`, its stream kept at unit scale.
    """
    equation = "x = sqrt((k-1)/k) x + N'(F(N x))/sqrt(k),  k = i + 2"
    end = "N x"
    arxiv = "–"
    kind = "pre"
    drawing = """
 x ──┬──▶ · sqrt((k-1)/k) ─────────────────────(+)──▶ x
     └──▶ N ──▶ F ──▶ N' ──▶ ÷ sqrt(k) ──────────┘      k = 2, 3, … over the sublayers"""

    def link(self, place: Place) -> Link:
        """Deeper sublayers add a smaller part."""
        return BeamLink(self.norm("input"), self.norm("stream"), place.index, place.branch_factor)


@dataclass(frozen=True)
class MuseOptions(Options):
    """The gate's temperature."""

    temperature: float = option(0.3, "what the gate's parameter is divided by", low=1e-3, high=1000)


class MuseLink(SandwichLink):
    """Muse Spark's gate."""

    equation = "x = sqrt(max(1 - b², 1e-3)) x + b N'(F(N x)),  b = σ(w/.3)"

    def __init__(
        self, norm: nn.Module, output_norm: nn.Module, dim: int, temperature: float, step: float = 1.0
    ) -> None:
        super().__init__(norm, output_norm)
        self.temperature, self.step = temperature, step
        self.w = nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def no_weight_decay(self) -> set[str]:
        """The gate: decay would pull it to one half."""
        return {"w"}

    def reset_parameters(self) -> None:
        """w ~ N(0, .02): about half of the update, and of the stream what keeps its variance."""
        nn.init.normal_(self.w, std=0.02)

    def gates(self) -> tuple[Tensor, Tensor]:
        """What multiplies the stream and the update; 1 - b² as (1 - b)(1 + b), which does not cancel near b = 1.

        Where updates are weighed by a branch factor, so is what the stream loses: over a stack it is the same.
        """
        w = widened(self.w) / self.temperature
        b = torch.sigmoid(w)
        skip = torch.sqrt(torch.clamp(torch.sigmoid(-w) * (1 + b), min=1e-3))
        return skip if self.step == 1 else skip**self.step, b

    def write(self, x: Tensor, output: Tensor, keep: Keep = None) -> Tensor:
        """Stream and update, weighed by channel."""
        skip, b = (gate.to(x.dtype) for gate in self.gates())
        return x * skip + self.dropped(self.output_norm(output) * b, keep)


class Muse(Topology):
    """The variance-preserving gate of Muse Spark."""

    name = "muse"
    about = """
    The variance-preserving gate of Muse Spark: ``x = sqrt(1 - b²) x + b N'(F(N x))``, b by channel.
    """
    equation = "x = sqrt(max(1 - b², 1e-3)) x + b N'(F(N x)),  b = σ(w/.3)"
    end = "N x"
    arxiv = "–"
    kind = "pre"
    options_class = MuseOptions
    options: MuseOptions
    drawing = """
 x ──┬──▶ * sqrt(1 - b²) ────────────────(+)──▶ x
     └──▶ N ──▶ F ──▶ N' ──▶ *b ───────────┘      b = σ(w/.3), a learned vector"""

    def link(self, place: Place) -> Link:
        """A gate a sublayer."""
        return MuseLink(
            self.norm("input"), self.norm("stream"), self.dim, self.options.temperature, place.branch_factor
        )


class ZayaLink(PreLink):
    """ZAYA's residual scaling."""

    equation = "x = s_r (x + b_r) + s_o (F(N x) + b_o)"

    def __init__(self, norm: nn.Module, dim: int) -> None:
        super().__init__(norm)
        self.s_r, self.b_r = nn.Parameter(torch.empty(dim)), nn.Parameter(torch.empty(dim))
        self.s_o, self.b_o = nn.Parameter(torch.empty(dim)), nn.Parameter(torch.empty(dim))
        self.reset_parameters()

    def no_weight_decay(self) -> set[str]:
        """All four: their start is Pre-Norm."""
        return {"s_r", "b_r", "s_o", "b_o"}

    def depth_powers(self) -> dict[str, float]:
        """Those of the skip."""
        return {"s_r": 1.0, "b_r": 1.0}

    def reset_parameters(self) -> None:
        """Scales 1 and biases 0: exactly Pre-Norm."""
        for scale, bias in ((self.s_r, self.b_r), (self.s_o, self.b_o)):
            nn.init.ones_(scale)
            nn.init.zeros_(bias)

    def write(self, x: Tensor, output: Tensor, keep: Keep = None) -> Tensor:
        """Stream and update, each moved and scaled by channel."""
        return self.s_r * (x + self.b_r) + self.dropped(self.s_o * (output + self.b_o), keep)


class Zaya(Topology):
    """ZAYA's residual scaling."""

    name = "zaya"
    about = """
    ZAYA's residual scaling: ``x = s_r (x + b_r) + s_o (F(N x) + b_o)``, four vectors per sublayer.
    """
    equation = "x = s_r (x + b_r) + s_o (F(N x) + b_o)"
    end = "N x"
    arxiv = "–"
    kind = "pre"
    drawing = """
 x ──┬──▶ + b_r ──▶ * s_r ─────────────────────(+)──▶ x
     └──▶ N ──▶ F ──▶ + b_o ──▶ * s_o ───────────┘      four learned vectors, at first 0 and 1"""

    def link(self, place: Place) -> Link:
        """Scales and biases of its own for every sublayer."""
        return ZayaLink(self.norm("input"), self.dim)
