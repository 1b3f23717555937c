"""Self-attention among all tokens of an image: no positions inside, no mask, no cache."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from siamesenorm.layers.attention import Attention
from siamesenorm.residual.base import SublayerNeeds
from siamesenorm.residual.norms import NormFactory


class VisionAttention(Attention):
    """Multi-head attention in which every token sees every other; weights and inner norms are those of `Attention`."""

    def __init__(
        self,
        dim: int,
        heads: int,
        *,
        needs: SublayerNeeds,
        norm: NormFactory,
        qk_norm: str = "none",
        bias: bool = True,
        qkv_bias: bool = True,
    ) -> None:
        head_dim = dim // heads
        super().__init__(
            dim, heads, heads, head_dim, needs=needs, norm=norm, qk_norm=qk_norm, bias=bias, qkv_bias=qkv_bias
        )

    def forward(self, h: Tensor) -> Tensor:  # type: ignore[override]  # nothing to share between layers
        """(batch, tokens, dim) to the same."""
        q, k, v = self.project(h)
        o = F.scaled_dot_product_attention(q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2))
        return self.output(o.transpose(1, 2).flatten(2))
