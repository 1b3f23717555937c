"""Causal self-attention: grouped queries, rotary positions, and whichever inner norms the topology asks for."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.attention.flex_attention import BlockMask, flex_attention

from siamesenorm.layers.cache import KeyValueCache
from siamesenorm.layers.kernels import decode
from siamesenorm.layers.linear import Linear
from siamesenorm.layers.mask import Visibility
from siamesenorm.layers.rotary import CosSin, rotate, split_and_rotate
from siamesenorm.residual.base import AttentionNorm, SublayerNeeds, WeightRole
from siamesenorm.residual.kernels.eager import runs_eager
from siamesenorm.residual.norms import NormFactory

RoleWeights = Iterator[tuple[WeightRole, Tensor]]


class KeyValueStore(Protocol):
    """A cache, seen from one attention: it takes new keys and values and gives back all of them."""

    def update(self, layer: int, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor]:
        """Store (batch, kv_heads, new tokens, head_dim) of a layer; return the same with all tokens so far."""
        ...


@dataclass(frozen=True)
class AttentionContext:
    """What every attention of one forward pass shares; made once by the model."""

    cos_sin: CosSin
    """cos and sin of this pass's positions."""
    visible: Visibility
    """Which keys each query sees."""
    cache: KeyValueStore | None = None
    """Keys and values of earlier tokens, where decoding."""
    windowed: AttentionContext | None = None
    """The same for blocks with a window, where others have none."""


Attend = Callable[[Tensor, Tensor, Tensor, Visibility, float], Tensor]


def attend(q: Tensor, k: Tensor, v: Tensor, visible: Visibility, dropout: float = 0.0) -> Tensor:
    """Softmax attention on (batch, heads, tokens, head_dim); k and v may have fewer heads than q."""
    if visible.blocks is not None:
        return attend_blocks(q, k, v, visible.blocks)
    if visible.last_keys is not None:
        k, v = k[:, :, -visible.last_keys :], v[:, :, -visible.last_keys :]
    return F.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=visible.mask,
        dropout_p=dropout,
        is_causal=visible.is_causal,
        enable_gqa=bool(k.shape[1] != q.shape[1]),  # a tensor where it is traced
    )


def attend_blocks(q: Tensor, k: Tensor, v: Tensor, blocks: BlockMask) -> Tensor:
    """The same by FlexAttention, whose kernel is compiled with the block it stands in, or else by itself."""
    kind = q.device.type
    if torch.is_autocast_enabled(kind):  # as SDPA does
        q, k, v = (heads.to(torch.get_autocast_dtype(kind)) for heads in (q, k, v))
    kernel: Any = flex_attention if torch.compiler.is_compiling() else _compiled_flex()
    return kernel(q, k, v, block_mask=blocks, enable_gqa=k.shape[1] != q.shape[1])


@functools.cache
def _compiled_flex() -> Callable[..., Tensor]:
    return torch.compile(flex_attention)


class Attention(nn.Module):
    """Multi-head attention over the residual stream's reading.

    dim: width of the stream; heads, kv_heads, head_dim: heads of queries, of keys and values, and their width.
    needs: what the topology wants inside (`Topology.needs(place)`).
    qk_norm: the model's own wish, ``none``, ``head`` or ``projection``; a topology's wish goes before it.
    qkv_bias: whether queries, keys and values have a bias; default: as `bias`, which is the output's too.
    query_factor: what queries are multiplied by, beside the standard 1/sqrt(head_dim).
    windowed: whether it takes the context of blocks with a window, where that is another.
    norm: makes the inner norms. layer: number of this attention in the cache.
    """

    def __init__(
        self,
        dim: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        *,
        needs: SublayerNeeds,
        norm: NormFactory,
        qk_norm: str = "none",
        bias: bool = False,
        qkv_bias: bool | None = None,
        query_factor: float = 1.0,
        windowed: bool = True,
        layer: int = 0,
    ) -> None:
        super().__init__()
        self.query_factor, self.windowed = query_factor, windowed
        self.heads, self.kv_heads, self.head_dim, self.layer = heads, kv_heads, head_dim, layer
        inner, inner_kv = heads * head_dim, kv_heads * head_dim
        qkv_bias = bias if qkv_bias is None else qkv_bias
        self.qkv = Linear(dim, inner + 2 * inner_kv, bias=qkv_bias)  # rows: all of q, all of k, all of v
        self.out = Linear(inner, dim, bias=bias)
        self.norm_kind = combine_norms(needs.attention_norm, qk_norm)
        self.q_norm = self.k_norm = self.v_norm = self.out_norm = None
        q, k, v, out = (needs.inner(name, norm) for name in ("q", "k", "v", "out"))
        if self.norm_kind == "qk_projection":
            self.q_norm, self.k_norm = q(inner), k(inner_kv)
        elif self.norm_kind != "none":
            self.q_norm, self.k_norm = q(head_dim), k(head_dim)
        if self.norm_kind == "qkv_head":
            self.v_norm = v(head_dim)
        if needs.output_norm:
            self.out_norm = out(inner)
        self.attend: Attend = attend

    def forward(self, h: Tensor, context: AttentionContext) -> Tensor:
        """(batch, tokens, dim) to the same."""
        if self.windowed and context.windowed is not None:
            context = context.windowed
        if not torch.is_grad_enabled() and runs_eager() and h.shape[1] == 1 and self.attend is attend:
            o = self.attend_next(*self.project(h), context)
        else:
            q, k, v = self.project_and_rotate(h, context.cos_sin)
            o = self.attend_all(q, k, v, context)
        return self.output(o.flatten(2))

    def attend_all(self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
        """Attention of rotated heads (batch, tokens, heads, head_dim) to themselves and the cache, the same shape."""
        q, k, v = q.transpose(1, 2), k.transpose(1, 2), v.transpose(1, 2)
        if context.cache is not None:
            k, v = context.cache.update(self.layer, k, v)
        return self.attend(q, k, v, context.visible, 0.0).transpose(1, 2)

    def attend_next(self, q: Tensor, k: Tensor, v: Tensor, context: AttentionContext) -> Tensor:
        """The same of one token whose heads are not yet rotated: on CPU, all of it in one compiled step."""
        cache, seen = context.cache, context.visible
        if isinstance(cache, KeyValueCache) and seen.mask is None:
            keys, values = cache.keys[self.layer], cache.values[self.layer]
            first = 0 if seen.last_keys is None else cache.length + 1 - seen.last_keys
            attended = decode.attention(q, k, v, *context.cos_sin, keys, values, cache.length, first)
            if attended is not None:
                return attended
        return self.attend_all(rotate(q, context.cos_sin), rotate(k, context.cos_sin), v, context)

    def project(self, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values (batch, tokens, heads, head_dim), normed where asked."""
        q, k, v = self.split(self.qkv(h))
        return self.scaled(self.normed(q, self.q_norm)), self.normed(k, self.k_norm), self.normed(v, self.v_norm)

    def project_and_rotate(self, h: Tensor, cos_sin: CosSin) -> tuple[Tensor, Tensor, Tensor]:
        """`project`, with queries and keys rotated by their positions."""
        qkv = self.qkv(h)
        if self.q_norm is None:
            q, k, v = split_and_rotate(qkv.unflatten(2, (-1, self.head_dim)), self.heads, self.kv_heads, cos_sin)
            return self.scaled(q), k, v
        q, k, v = self.split(qkv)
        q, k, v = self.normed(q, self.q_norm), self.normed(k, self.k_norm), self.normed(v, self.v_norm)
        return self.scaled(rotate(q, cos_sin)), rotate(k, cos_sin), v

    def output(self, o: Tensor) -> Tensor:
        """The update from all heads side by side, (..., heads * head_dim), normed where asked."""
        return self.out(o if self.out_norm is None else self.out_norm(o))

    def scaled(self, q: Tensor) -> Tensor:
        """Queries as large as the model has them."""
        return q if self.query_factor == 1 else q * self.query_factor

    def split(self, qkv: Tensor) -> tuple[Tensor, ...]:
        """Heads of queries, keys and values."""
        heads = qkv.unflatten(2, (-1, self.head_dim))
        return heads.split([self.heads, self.kv_heads, self.kv_heads], dim=2)

    def normed(self, heads: Tensor, norm: nn.Module | None) -> Tensor:
        """Heads (batch, tokens, heads, head_dim), normed one by one or, by ``qk_projection``, a token's all at once."""
        if norm is None:
            return heads
        return norm(heads.flatten(2)).view_as(heads) if self.norm_kind == "qk_projection" else norm(heads)

    def role_weights(self) -> RoleWeights:
        """Weights by the role that init rules speak of; q, k and v as views of the fused projection."""
        inner, inner_kv = self.heads * self.head_dim, self.kv_heads * self.head_dim
        q, k, v = self.qkv.weight.split([inner, inner_kv, inner_kv])
        yield "query", q
        yield "key", k
        yield "value", v
        yield "attention_out", self.out.weight

    def hidden_matrices(self) -> dict[str, int]:
        """Weights by name, and the rows of one matrix in each: every head of q, k and v is one of its own."""
        return {"qkv.weight": self.head_dim, "out.weight": self.out.out_features}

    def short_matrices(self) -> set[str]:
        """Weights whose matrices have as many rows in a wider stack: a head is as large there."""
        return {"qkv.weight"}


def combine_norms(topology: AttentionNorm, model: str) -> AttentionNorm:
    """The inner norm of attention: the topology's, which contains a QK-norm already, or else the model's."""
    if topology != "none":
        return topology
    known: dict[str, AttentionNorm] = {"none": "none", "head": "qk_head", "projection": "qk_projection"}
    return known[model]
