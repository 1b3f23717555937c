"""HybridNorm: attention normalises its own queries, keys and values; only the FFN has a norm on the stream."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor, nn

from siamesenorm.errors import TopologyError
from siamesenorm.residual.base import Link, SublayerNeeds, Topology
from siamesenorm.residual.depth import DEPTH_SCALES, DepthScaling, depth_factor
from siamesenorm.residual.drop import Keep
from siamesenorm.residual.options import Options, option
from siamesenorm.residual.places import Place
from siamesenorm.residual.post import PostStartLink
from siamesenorm.residual.pre import PreLink, RawLink
from siamesenorm.residual.summands import mean_gain


@dataclass(frozen=True)
class HybridOptions(Options):
    """What SiameseNorm adds to its HybridNorm stream, here on that stream alone (an ablation of arXiv 2602.08064)."""

    input_norm: bool = option(False, "normalise what the FFN reads once more (N_in), not what it is added to")
    depth_scaling: DepthScaling = option("none", "c_l by which updates are divided")


class ScaledRawLink(RawLink):
    """x = x + F(x)/c."""

    equation = "x = x + F(x)/c: no norm of its own"

    def __init__(self, depth_scale: float) -> None:
        super().__init__()
        self.scale = depth_factor(1 / depth_scale)

    def write(self, x: Tensor, output: Tensor, keep: Keep = None) -> Tensor:
        """x + O/c."""
        return super().write(x, output * self.scale, keep)


class ScaledStartLink(PostStartLink):
    """z = N x; x = z + F(N_in z)/c."""

    equation = "z = N x; x = z + F(N_in z)/c"

    def __init__(self, norm: nn.Module, input_norm: nn.Module | None, depth_scale: float) -> None:
        super().__init__(norm)
        self.input_norm = input_norm
        self.scale = depth_factor(1 / depth_scale)

    def read(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """N x, as the stream; normalised again for the sublayer."""
        x = self.norm(x)
        return x, x if self.input_norm is None else self.input_norm(x)

    def write(self, x: Tensor, output: Tensor, keep: Keep = None) -> Tensor:
        """z + O/c."""
        return super().write(x, output * self.scale, keep)

    def read_gain(self, previous: Link | None) -> float:
        """N_in's, else N's."""
        return super().read_gain(previous) if self.input_norm is None else mean_gain(self.input_norm)


class Hybrid(Topology):
    """HybridNorm (arXiv 2503.04598)."""

    name = "hybrid"
    about = """
    HybridNorm: ``y = x + Attn_qkv(x); z = N(y); x = z + FFN(z)``, ``out = N(x)``. arXiv 2503.04598.
    """
    equation = "y = x + Attn_qkv(x);  z = N y;  x = z + FFN(z)"
    end = "N x"
    arxiv = "2503.04598"
    kind = "post"
    options_class: ClassVar[type[Options]] = HybridOptions
    drawing = """
 x ──┬───────────────(+)──▶ y ──▶ N ──┬──────────────(+)──▶ x
     └──▶ Attn_qkv ────┘              └──▶ FFN ────────┘

 Attn_qkv: a norm per head on Q, K and V, before RoPE"""

    def setup(self) -> None:
        """Attention and FFN are treated differently, so neither may hide in the other."""
        if any(place.kind == "parallel" for place in self.places):
            raise TopologyError(
                f"{self.name}: 'parallel' sublayers are not allowed, because attention and FFN read different "
                "inputs; allowed: attention, cross_attention, ffn"
            )

    def link(self, place: Place) -> Link:
        """Attention reads the raw stream; the FFN's residual is taken after its norm."""
        chosen = self.options
        if not isinstance(chosen, HybridOptions) or not (chosen.input_norm or chosen.depth_scaling != "none"):
            return RawLink() if place.is_attention else PostStartLink(self.norm("stream"))
        scale = DEPTH_SCALES[chosen.depth_scaling](place.depth)
        if place.is_attention:
            return ScaledRawLink(scale)
        return ScaledStartLink(self.norm("stream"), self.norm("input") if chosen.input_norm else None, scale)

    def needs(self, place: Place) -> SublayerNeeds:
        """QKV-norm per head."""
        return SublayerNeeds("qkv_head" if place.is_attention else "none")


class HybridStar(Hybrid):
    """HybridNorm* (arXiv 2503.04598)."""

    name = "hybrid_star"
    about = """
    HybridNorm*: HybridNorm whose block 0 is Pre-Norm with QKV-norm. arXiv 2503.04598.
    """
    equation = "hybrid;  block 0: y = x + Attn_qkv(N x);  x = y + FFN(N y)"
    options_class = Options
    drawing = """
 x ──┬────────────────────(+)──▶ y ──┬────────────────────(+)──▶ x     block 0
     └──▶ N ──▶ Attn_qkv ───┘        └──▶ N ──▶ FFN ────────┘

 x ──┬───────────────(+)──▶ y ──▶ N ──┬──────────────(+)──▶ x          the others
     └──▶ Attn_qkv ────┘              └──▶ FFN ────────┘"""

    def link(self, place: Place) -> Link:
        """Pre-Norm in block 0."""
        return PreLink(self.norm("input")) if place.depth < 1 else super().link(place)
