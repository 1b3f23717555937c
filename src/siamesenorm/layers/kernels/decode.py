"""What decoding needs, one token per row: a linear layer on few rows, attention to a cache, a mixture of experts.

`siamesenorm::few_rows_linear`, `siamesenorm::next_token_attention` and `siamesenorm::few_tokens_experts` take no
gradient; each function here gives None where its operator may not run or would be slower than PyTorch's.
"""

from __future__ import annotations

import math
from ctypes import Structure, c_int32, c_int64, c_void_p
from typing import Any

import torch
from torch import Tensor

from siamesenorm.residual.kernels import native
from siamesenorm.residual.kernels.eager import runs_eager
from siamesenorm.residual.kernels.operator import define, operators

FEW_ROWS = 16
"""Up to so many rows, the kernel walks over the weights faster than PyTorch's matrix product."""

FEW_SLOTS = 128
"""The same of experts, in tokens times the experts that each is sent to."""


class LinearArgs(Structure):
    """`LinearCall` of sublayers.c."""

    _fields_ = (
        *((name, c_int64) for name in ("rows", "width", "out_dim")),
        ("threads", c_int32),
        *((name, c_void_p) for name in ("x", "weight", "bias", "out")),
    )


class ExpertsArgs(Structure):
    """`ExpertsCall` of experts.c."""

    _fields_ = (
        *((name, c_int64) for name in ("tokens", "dim", "hidden", "experts", "top_k")),
        *((name, c_int32) for name in ("threads", "normalize")),
        *((name, c_void_p) for name in ("h", "router", "w_in", "b_in", "w_out", "b_out", "out", "stats", "counts")),
    )


class DecodeArgs(Structure):
    """`DecodeCall` of sublayers.c."""

    _fields_ = (
        *((name, c_int64) for name in ("batch", "heads", "kv_heads", "width", "room", "length", "first")),
        *((name, c_int64) for name in ("q_batch", "k_batch", "v_batch")),
        ("threads", c_int32),
        *((name, c_void_p) for name in ("cosine", "sine", "q", "k", "v", "keys", "values", "out")),
    )


def _decodes(*tensors: Tensor | None) -> bool:
    """Asked before any size is: a graph that is recorded must not hang on sizes for what it does not run."""
    return (
        not torch.is_grad_enabled()
        and runs_eager(*tensors)
        and native.takes(*tensors)
        and not torch.is_autocast_enabled("cpu")
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor | None:
    """``x @ weight.T + bias`` for a few rows."""
    if not _decodes(x, weight, bias) or weight.dim() != 2 or x.numel() > FEW_ROWS * x.shape[-1]:
        return None
    return operators.few_rows_linear(x, weight, bias)


def _linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    x, weight, bias, (out_dim, width) = x.contiguous(), weight.contiguous(), native.whole(bias), weight.shape
    out = x.new_empty((*x.shape[:-1], out_dim))
    addresses = (
        native.pointer(x, (*x.shape[:-1], width)),
        native.pointer(weight, weight.shape),
        native.pointer(bias, (out_dim,)),
        native.pointer(out, out.shape),
    )
    native.call("linear", LinearArgs(math.prod(x.shape[:-1]), width, out_dim, torch.get_num_threads(), *addresses))
    return out


def experts(
    tokens: Tensor,
    top_k: int,
    normalize: bool,
    router: Tensor,
    w_in: Tensor,
    b_in: Tensor | None,
    w_out: Tensor,
    b_out: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor] | None:
    """A mixture of SwiGLU experts on a few tokens: output, (balance loss, z-loss, entropy), slots of each expert."""
    weights = (router, w_in, b_in, w_out, b_out)
    if not _decodes(tokens, *weights) or tokens.shape[0] * top_k > FEW_SLOTS:
        return None
    return operators.few_tokens_experts(tokens, top_k, normalize, *weights)


def _experts(
    tokens: Tensor, top_k: int, normalize: bool, router: Tensor, w_in: Tensor, b_in: Any, w_out: Tensor, b_out: Any
) -> tuple[Tensor, Tensor, Tensor]:
    tokens, (count, dim), (number, _, hidden) = tokens.contiguous(), tokens.shape, w_out.shape
    router, w_in, w_out = router.contiguous(), w_in.contiguous(), w_out.contiguous()
    b_in, b_out = native.whole(b_in), native.whole(b_out)
    if not 1 <= top_k <= number:
        raise RuntimeError(f"experts: {top_k} of {number} cannot be chosen")
    out, stats = torch.empty_like(tokens), tokens.new_empty(3)
    counts = torch.empty(number, dtype=torch.long)
    addresses = (
        native.pointer(tokens, (count, dim)),
        native.pointer(router, (number, dim)),
        native.pointer(w_in, (number, 2 * hidden, dim)),
        native.pointer(b_in, (number, 2 * hidden)),
        native.pointer(w_out, (number, dim, hidden)),
        native.pointer(b_out, (number, dim)),
        native.pointer(out, (count, dim)),
        native.pointer(stats, (3,)),
        native.pointer(counts, (number,), torch.long),
    )
    sizes = (count, dim, hidden, number, top_k, torch.get_num_threads(), normalize)
    native.call("experts", ExpertsArgs(*sizes, *addresses))
    return out, stats, counts


def attention(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, length: int, first: int
) -> Tensor | None:
    """Attention of one new token, (batch, 1, heads * head_dim), from q, k, v (batch, 1, heads, head_dim) before RoPE.

    cos, sin: angles of the one position that all rows are at. keys, values: the cache, (batch, kv_heads, room,
    head_dim), holding `length` tokens; the rotated key and the value are written behind them. first: the first token
    that is seen.
    """
    if not _decodes(q, k, v, cos, sin, keys, values) or q.shape[1] != 1 or cos.numel() != q.shape[3]:
        return None
    return operators.next_token_attention(q, k, v, cos, sin, keys, values, length, first)


def _attention(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, length: int, first: int
) -> Tensor:
    batch, _, heads, width = q.shape
    kv_heads, room = k.shape[2], keys.shape[2]
    if not kv_heads or heads % kv_heads or width % 2 or not 0 <= first <= length < room:
        raise RuntimeError(
            f"attention: {heads} and {kv_heads} heads of width {width} do not fit a cache that holds {length} of "
            f"{room} tokens and is seen from {first}"
        )
    # Heads of one token must lie side by side; rows of the batch may be apart.
    q, k, v = (t if t.stride()[2:] == (width, 1) else t.contiguous() for t in (q, k, v))
    out = q.new_empty(batch, 1, heads * width)
    cos, sin = cos.contiguous(), sin.contiguous()
    cache = (batch, kv_heads, room, width)
    addresses = (
        native.pointer(cos.view(-1), (width,)),
        native.pointer(sin.view(-1), (width,)),
        native.strided(q, (batch, 1, heads, width)),
        native.strided(k, (batch, 1, kv_heads, width)),
        native.strided(v, (batch, 1, kv_heads, width)),
        native.pointer(keys, cache),
        native.pointer(values, cache),
        native.pointer(out, out.shape),
    )
    sizes = (batch, heads, kv_heads, width, room, length, first, q.stride(0), k.stride(0), v.stride(0))
    native.call("decode", DecodeArgs(*sizes, torch.get_num_threads(), *addresses))
    return out


def _linear_flops(x: Any, weight: Any, *_: Any, **__: Any) -> int:
    return 2 * math.prod(x[:-1]) * math.prod(weight)


def _experts_flops(
    tokens: Any, top_k: int, normalize: bool, router: Any, w_in: Any, b_in: Any, w_out: Any, *_: Any, **__: Any
) -> int:
    return 2 * tokens[0] * (math.prod(router) + top_k * (math.prod(w_in[1:]) + math.prod(w_out[1:])))


def _attention_flops(
    q: Any, k: Any, v: Any, cos: Any, sin: Any, keys: Any, values: Any, length: int, first: int, **_: Any
) -> int:
    return 4 * math.prod(q) * (length + 1 - first)


define(
    "few_rows_linear(Tensor x, Tensor weight, Tensor? bias) -> Tensor",
    cpu=_linear,
    fake=lambda x, weight, bias: x.new_empty((*x.shape[:-1], weight.shape[0])),
    flops=_linear_flops,
)
define(
    "few_tokens_experts(Tensor tokens, int top_k, bool normalize, Tensor router, Tensor w_in, Tensor? b_in, "
    "Tensor w_out, Tensor? b_out) -> (Tensor, Tensor, Tensor)",
    cpu=_experts,
    fake=lambda tokens, top_k, normalize, router, *rest: (
        torch.empty_like(tokens),
        tokens.new_empty(3),
        torch.empty(router.shape[0], dtype=torch.long, device=tokens.device),
    ),
    flops=_experts_flops,
)
define(
    "next_token_attention(Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin, Tensor(a!) keys, Tensor(b!) values, "
    "int length, int first) -> Tensor",
    cpu=_attention,
    fake=lambda q, *rest: q.new_empty(q.shape[0], 1, q.shape[2] * q.shape[3]),
    flops=_attention_flops,
)
