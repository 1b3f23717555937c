"""`siamesenorm::sinkhorn`: doubly stochastic matrices from logits, all of Sinkhorn's rounds in one pass over tokens.

Backward keeps the logits alone and goes through the rounds again.
"""

from __future__ import annotations

import math
from ctypes import Structure, c_float, c_int32, c_int64, c_void_p
from functools import partial
from typing import Any

import torch
from torch import Tensor

from siamesenorm.residual.kernels import native
from siamesenorm.residual.kernels.eager import plain_gradients, runs_eager, wants_plain_backward
from siamesenorm.residual.kernels.operator import define, operators

LARGEST = 16384
"""Of n² times rounds: backward holds all of them for sixteen tokens, a mebibyte for each thread."""


class SinkhornArgs(Structure):
    """`SinkhornCall` of sinkhorn.c."""

    _fields_ = (
        ("tokens", c_int64),
        ("n", c_int64),
        ("rounds", c_int64),
        ("threads", c_int32),
        ("eps", c_float),
        *((name, c_void_p) for name in ("logits", "grad", "out")),
    )


def plain(logits: Tensor, rounds: int, eps: float) -> Tensor:
    """The same in PyTorch's operators."""
    n = math.isqrt(logits.shape[-1])
    # Tokens last: sums over n numbers then run over all tokens at once.
    M = logits.movedim(-1, 0).contiguous().unflatten(0, (n, n)).softmax(1) + eps
    M = M / (M.sum(0, keepdim=True) + eps)
    for _ in range(rounds - 1):
        M = M / (M.sum(1, keepdim=True) + eps)
        M = M / (M.sum(0, keepdim=True) + eps)
    return M.flatten(0, 1).movedim(0, -1)


def sinkhorn(logits: Tensor, rounds: int, eps: float) -> Tensor:
    """A doubly stochastic matrix (..., n, n) from n² logits (..., n²): softmax by rows, then columns and rows in turn.

    It ends with the columns, which therefore sum to one exactly while eps is 0.
    """
    n = math.isqrt(logits.shape[-1])
    small = logits.shape[-1] * rounds <= LARGEST
    operator = small and runs_eager(logits) and native.takes(logits)
    return (operators.sinkhorn if operator else plain)(logits, rounds, eps).unflatten(-1, (n, n))


def _forward(logits: Tensor, rounds: int, eps: float) -> Tensor:
    return _call("sinkhorn_forward", logits.contiguous(), None, rounds, eps)


def _backward(grad: Tensor, logits: Tensor, rounds: int, eps: float) -> Tensor:
    return _call("sinkhorn_backward", logits.contiguous(), grad.contiguous(), rounds, eps)


def _call(name: str, logits: Tensor, grad: Tensor | None, rounds: int, eps: float) -> Tensor:
    size, out = logits.shape[-1], torch.empty_like(logits)
    n = math.isqrt(size)
    if not n or n * n != size or not 1 <= rounds <= LARGEST // size:
        raise RuntimeError(f"sinkhorn: {size} logits and {rounds} rounds; n² logits and 1 to {LARGEST} / n² rounds go")
    tokens, threads = math.prod(logits.shape[:-1]), torch.get_num_threads()
    addresses = (native.pointer(tensor, logits.shape) for tensor in (logits, grad, out))
    native.call(name, SinkhornArgs(tokens, n, rounds, threads, eps, *addresses))
    return out


def _keep(ctx: Any, inputs: tuple[Tensor, int, float], output: Tensor) -> None:
    logits, ctx.rounds, ctx.eps = inputs
    ctx.save_for_backward(logits)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
    (logits,) = ctx.saved_tensors
    if wants_plain_backward():
        return plain_gradients(partial(plain, rounds=ctx.rounds, eps=ctx.eps), (logits,), (grad,))[0], None, None
    return operators.sinkhorn_backward(grad, logits, ctx.rounds, ctx.eps), None, None


define(
    "sinkhorn_backward(Tensor grad, Tensor logits, int rounds, float eps) -> Tensor",
    cpu=_backward,
    fake=lambda grad, logits, rounds, eps: torch.empty_like(logits, memory_format=torch.contiguous_format),
)
define(
    "sinkhorn(Tensor logits, int rounds, float eps) -> Tensor",
    cpu=_forward,
    fake=lambda logits, rounds, eps: torch.empty_like(logits, memory_format=torch.contiguous_format),
    keep=_keep,
    differentiate=_differentiate,
)
