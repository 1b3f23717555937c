"""The compiled CPU kernels of kernels.c and experts.c: SwiGLU, rotary positions, and what decoding needs.

Each function is called behind its `..._usable`; elsewhere the layers run the same equations with PyTorch's operators.
"""

from __future__ import annotations

from ctypes import Structure, c_float, c_int32, c_int64, c_void_p

import torch
from torch import Tensor

from siamesenorm.residual.native import address, call, plain

FEW_ROWS = 16
"""Up to so many rows, `linear` walks over the weights faster than PyTorch's matrix product."""

FEW_SLOTS = 128
"""The same of `experts`, in tokens times the experts that each is sent to."""


class LinearArgs(Structure):
    """`LinearCall` of kernels.c."""

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


class SwiGLUArgs(Structure):
    """`SwiGLUCall` of kernels.c."""

    _fields_ = (
        ("rows", c_int64),
        ("hidden", c_int64),
        ("threads", c_int32),
        *((name, c_void_p) for name in ("projected", "grad", "out")),
    )


class HeadsArgs(Structure):
    """`Heads` of kernels.c."""

    _fields_ = (("data", c_void_p), *((name, c_int64) for name in ("batch", "token", "head")))


class TurnArgs(Structure):
    """`TurnCall` of kernels.c."""

    _fields_ = (
        *((name, c_int64) for name in ("batch", "tokens", "heads", "width", "turns")),
        ("threads", c_int32),
        ("direction", c_float),
        ("cosine", c_void_p),
        ("sine", c_void_p),
        ("x", HeadsArgs),
        ("out", HeadsArgs),
    )


class DecodeArgs(Structure):
    """`DecodeCall` of kernels.c."""

    _fields_ = (
        *((name, c_int64) for name in ("batch", "heads", "kv_heads", "width", "room", "length", "first")),
        *((name, c_int64) for name in ("q_batch", "k_batch", "v_batch")),
        ("threads", c_int32),
        *((name, c_void_p) for name in ("cosine", "sine", "q", "k", "v", "keys", "values", "out")),
    )


def linear_usable(x: Tensor, weight: Tensor, bias: Tensor | None) -> bool:
    """Whether `linear` may run, and is faster than PyTorch's."""
    width = x.shape[-1]
    return (
        0 < x.numel() <= FEW_ROWS * width
        and plain(x, weight, bias)
        and weight.dim() == 2
        and weight.shape[1] == width
        and weight.is_contiguous()
        and (bias is None or (bias.shape == weight.shape[:1] and bias.is_contiguous()))
        and not torch.is_autocast_enabled("cpu")
    )


def linear(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """``x @ weight.T + bias`` for a few rows."""
    x, (out_dim, width) = x.contiguous(), weight.shape
    out = x.new_empty((*x.shape[:-1], out_dim))
    rows, shift = x.numel() // width, None if bias is None else bias.data_ptr()
    addresses = x.data_ptr(), weight.data_ptr(), shift, out.data_ptr()
    call("linear", LinearArgs(rows, width, out_dim, torch.get_num_threads(), *addresses))
    return out


def experts_usable(tokens: Tensor, top_k: int, *weights: Tensor | None) -> bool:
    """Whether `experts` may run on these tokens and weights, and is faster than PyTorch's products."""
    return (
        0 < tokens.shape[0] * top_k <= FEW_SLOTS
        and plain(tokens, *weights)
        and all(w is None or w.is_contiguous() for w in weights)
        and not torch.is_autocast_enabled("cpu")
    )


def experts(
    tokens: Tensor,
    top_k: int,
    normalize: bool,
    router: Tensor,
    w_in: Tensor,
    b_in: Tensor | None,
    w_out: Tensor,
    b_out: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """A mixture of SwiGLU experts on a few tokens: output, (balance loss, z-loss, entropy), slots of each expert."""
    tokens = tokens.contiguous()
    out, stats = torch.empty_like(tokens), tokens.new_empty(3)
    counts = torch.empty(len(router), dtype=torch.long)
    addresses = map(address, (tokens, router, w_in, b_in, w_out, b_out, out, stats, counts))
    sizes = (*tokens.shape, w_out.shape[2], len(router), top_k, torch.get_num_threads(), normalize)
    call("experts", ExpertsArgs(*sizes, *addresses))
    return out, stats, counts


def swiglu_usable(projected: Tensor, grad: Tensor | None = None) -> bool:
    """Whether the two below may run on these rows."""
    return plain(projected, grad) and projected.is_contiguous() and projected.numel() > 0


def swiglu(projected: Tensor) -> Tensor:
    """``silu(gate) * value`` of contiguous rows (value, gate)."""
    *rows, both = projected.shape
    out = projected.new_empty((*rows, both // 2))
    call("swiglu_forward", _swiglu_args(projected, None, out))
    return out


def swiglu_backward(grad: Tensor, projected: Tensor) -> Tensor:
    """The gradient of contiguous rows (value, gate)."""
    out = torch.empty_like(projected)
    call("swiglu_backward", _swiglu_args(projected, grad, out))
    return out


def _swiglu_args(projected: Tensor, grad: Tensor | None, out: Tensor) -> SwiGLUArgs:
    hidden = projected.shape[-1] // 2
    rows = projected.numel() // (2 * hidden)
    gradient = None if grad is None else grad.data_ptr()
    return SwiGLUArgs(rows, hidden, torch.get_num_threads(), projected.data_ptr(), gradient, out.data_ptr())


def turn_usable(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor) -> bool:
    """Whether `turn` may run: (batch, tokens, heads, head_dim), features side by side, one angle row a token."""
    return (
        plain(x, cos, sin, out)
        and x.dim() == 4
        and x.numel() > 0
        and x.stride(3) == out.stride(3) == 1
        and cos.is_contiguous()
        and sin.is_contiguous()
        and cos.numel() in (x.shape[1] * x.shape[3], x.shape[0] * x.shape[1] * x.shape[3])
    )


def turn(x: Tensor, cos: Tensor, sin: Tensor, out: Tensor, direction: float) -> Tensor:
    """Heads turned into `out`, which is other memory; direction -1 turns back."""
    width = x.shape[3]
    turns, threads = cos.numel() // width, torch.get_num_threads()
    heads = [HeadsArgs(t.data_ptr(), *t.stride()[:3]) for t in (x, out)]
    call("turn", TurnArgs(*x.shape, turns, threads, direction, cos.data_ptr(), sin.data_ptr(), *heads))
    return out


def decode_usable(q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor) -> bool:
    """Whether `decode` may run: one new token a row, at the same position in all of them."""
    width = q.shape[3]
    return (
        plain(q, k, v, cos, sin, keys)
        and q.shape[1] == 1
        and q.numel() > 0
        and cos.numel() == sin.numel() == width
        and all(t.stride(2) == width and t.stride(3) == 1 for t in (q, k, v))
    )


def decode(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, length: int, first: int
) -> Tensor:
    """Attention of one new token, (batch, 1, heads * head_dim), from q, k and v (batch, 1, heads, head_dim) unturned.

    keys, values: the cache, (batch, kv_heads, room, head_dim), holding `length` tokens; the turned key and the value
    are written behind them. first: the first token that is seen.
    """
    batch, _, heads, width = q.shape
    out = q.new_empty(batch, 1, heads * width)
    arguments = DecodeArgs(
        batch, heads, k.shape[2], width, keys.shape[2], length, first, q.stride(0), k.stride(0), v.stride(0),
        torch.get_num_threads(), *[t.data_ptr() for t in (cos, sin, q, k, v, keys, values, out)],
    )  # fmt: skip
    call("decode", arguments)
    return out
