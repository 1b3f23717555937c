"""HybridNorm: attention normalises its own queries, keys and values; only the FFN has a norm on the stream."""

from __future__ import annotations

from siamesenorm.residual.base import Link, SublayerNeeds, Topology
from siamesenorm.residual.errors import TopologyError
from siamesenorm.residual.places import Place
from siamesenorm.residual.post import PostStartLink
from siamesenorm.residual.pre import PreLink, RawLink


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
        return RawLink() if place.is_attention else PostStartLink(self.norm("stream"))

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
    drawing = """
 x ──┬────────────────────(+)──▶ y ──┬────────────────────(+)──▶ x     block 0
     └──▶ N ──▶ Attn_qkv ───┘        └──▶ N ──▶ FFN ────────┘

 x ──┬───────────────(+)──▶ y ──▶ N ──┬──────────────(+)──▶ x          the others
     └──▶ Attn_qkv ────┘              └──▶ FFN ────────┘"""

    def link(self, place: Place) -> Link:
        """Pre-Norm in block 0."""
        return PreLink(self.norm("input")) if place.depth < 1 else super().link(place)
