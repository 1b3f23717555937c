"""Cross-entropy of a language head, a chunk of tokens at a time.

With a vocabulary of 100k, the logits of one row of 2048 tokens fill 0.8 GB and their gradient as much again. Here
the logits of a chunk are made, turned into their own gradient in place, multiplied into the gradients of the
hidden states and of the head, and dropped; backward then only scales what is ready.
"""

from __future__ import annotations

from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from siamesenorm.residual.kernels.eager import plain_gradients, runs_eager, wants_plain_backward

CHUNK_LOGITS = 2**24  # 64 MB of float32
CHUNK_TOKENS = 256  # fewer and the head's weight is read from memory more often than it is used


class VocabularyPart(Protocol):
    """What one process has of a vocabulary that several divide: its rows of the head, and sums with the others."""

    first: int
    """The token of its first row."""

    def max_(self, values: Tensor) -> Tensor:
        """The largest of all processes, in place."""
        ...

    def sum_(self, values: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        ...


def chunk_tokens(vocabulary: int) -> int:
    """Tokens whose logits are made at once."""
    return max(CHUNK_TOKENS, CHUNK_LOGITS // vocabulary)


def linear_cross_entropy(
    hidden: Tensor,
    weight: Tensor,
    labels: Tensor,
    *,
    ignore_index: int = -100,
    z_weight: float = 0.0,
    reduction: str = "mean",
    chunk: int | None = None,
    part: VocabularyPart | None = None,
) -> Tensor:
    """``F.cross_entropy(hidden @ weight.T, labels)`` without ever holding all logits.

    hidden: (..., dim); weight: (vocabulary, dim); labels: (...), with `ignore_index` where there is none.
    z_weight: weight of the mean of log(Z)^2, which keeps logits from drifting (arXiv 2204.02311).
    reduction: ``mean`` over labels that count, or ``sum``.
    part: where `weight` is a part of the head, what the others add; the gradient of `hidden` is a part of the sum then.
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction: {reduction!r} is not allowed; it takes mean or sum")
    if hidden.shape[:-1] != labels.shape:
        raise ValueError(
            f"labels: shape {tuple(labels.shape)} does not fit hidden states of shape {tuple(hidden.shape)}"
        )
    hidden, labels = hidden.reshape(-1, hidden.shape[-1]), labels.reshape(-1)
    if torch.is_autocast_enabled(hidden.device.type):
        dtype = torch.get_autocast_dtype(hidden.device.type)
        if dtype == torch.float16:
            dtype = torch.float32  # gradients are made before the loss scale reaches them, and would vanish in float16
        hidden, weight = hidden.to(dtype), weight.to(dtype)
    counted = (labels != ignore_index).sum().clamp(min=1) if reduction == "mean" else labels.new_ones(())
    if part is None and not runs_eager(hidden, weight, labels) and not torch.compiler.is_compiling():
        return plain(hidden, weight, labels, counted, ignore_index, z_weight)
    chunk = chunk or chunk_tokens(weight.shape[0])
    return _LinearCrossEntropy.apply(hidden, weight, labels, counted, ignore_index, z_weight, chunk, part)


def plain(hidden: Tensor, weight: Tensor, labels: Tensor, counted: Tensor, ignore: int, z_weight: float) -> Tensor:
    """The same with all logits at once, in ordinary operators: for transforms, traces and second derivatives."""
    return _of_logits(F.linear(hidden, weight), labels, counted, ignore, z_weight)


def _of_logits(logits: Tensor, labels: Tensor, counted: Tensor, ignore: int, z_weight: float) -> Tensor:
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    losses = F.cross_entropy(logits, labels, ignore_index=ignore, reduction="none")
    if z_weight:
        losses = losses + z_weight * logits.logsumexp(-1).square().where(labels != ignore, 0)
    return losses.sum() / counted


def logits_cross_entropy(logits: Tensor, labels: Tensor, *, ignore_index: int = -100, z_weight: float = 0.0) -> Tensor:
    """`linear_cross_entropy` where the logits are there already, because the caller wants to see them: the mean."""
    rows, flat = logits.reshape(-1, logits.shape[-1]), labels.reshape(-1)
    return _of_logits(rows, flat, (flat != ignore_index).sum().clamp(min=1), ignore_index, z_weight)


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        labels: Tensor,
        counted: Tensor,
        ignore: int,
        z: float,
        chunk: int,
        part: VocabularyPart | None,
    ) -> Tensor:
        want_hidden, want_weight = ctx.needs_input_grad[:2]
        grad_hidden = torch.empty_like(hidden) if want_hidden else None
        # Sums over many chunks stay in float32 also for a bfloat16 head.
        wide = torch.promote_types(hidden.dtype, torch.float32)
        make = torch.empty_like if hidden.shape[0] else torch.zeros_like  # without tokens nothing is written into it
        grad_weight = make(weight, dtype=wide) if want_weight else None
        total = torch.zeros((), dtype=wide, device=hidden.device)
        with torch.autocast(hidden.device.type, enabled=False):
            for start in range(0, hidden.shape[0], chunk):
                rows, y = hidden[start : start + chunk], labels[start : start + chunk]
                counts = y != ignore
                logits = F.linear(rows, weight).to(wide)
                target, own = y.where(counts, 0), counts
                if part is not None:
                    target = target - part.first
                    own = counts & (target >= 0) & (target < weight.shape[0])
                    target = target.where(own, 0)
                target = target.unsqueeze(-1)
                chosen = logits.gather(-1, target).squeeze(-1)
                # exp(logits - largest), once: its row sums give the loss, and divided by them it is the gradient.
                largest = logits.amax(-1, keepdim=True)
                if part is not None:
                    largest = part.max_(largest)
                sums = logits.sub_(largest).exp_().sum(-1)
                if part is not None:
                    sums, chosen = part.sum_(torch.stack([sums, chosen.where(own, 0)])).unbind()
                log_z = sums.log().add_(largest.squeeze(-1))
                losses = log_z - chosen
                if z:
                    losses = losses + z * log_z.square()
                total += losses.where(counts, 0).sum()
                if not (want_hidden or want_weight):
                    continue
                scale = counts.to(wide) / counted
                factor = scale * (1 + 2 * z * log_z) if z else scale
                grad = logits.mul_((factor / sums).unsqueeze(-1))
                grad = grad.scatter_add_(-1, target, -scale.where(own, 0).unsqueeze(-1)).to(rows.dtype)
                if grad_hidden is not None:
                    torch.mm(grad, weight, out=grad_hidden[start : start + chunk])
                if grad_weight is not None:
                    _add_product(grad_weight, grad.t(), rows, first=start == 0)
        grad_weight = None if grad_weight is None else grad_weight.to(weight.dtype)
        ctx.save_for_backward(grad_hidden, grad_weight, hidden, weight, labels, counted)
        ctx.ignore, ctx.z, ctx.part = ignore, z, part
        return total / counted

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        *grads, hidden, weight, labels, counted = ctx.saved_tensors
        if wants_plain_backward():
            if ctx.part is not None:
                raise NotImplementedError("second derivatives are not there where processes divide the vocabulary")
            found = plain_gradients(
                lambda h, w: plain(h, w, labels, counted, ctx.ignore, ctx.z), (hidden, weight), (grad,)
            )
            return *found, None, None, None, None, None, None
        if not _may_look(grad) or grad.item() != 1:
            grads = [None if g is None else g * grad.to(g.dtype) for g in grads]
        return *grads, None, None, None, None, None, None


def _may_look(number: Tensor) -> bool:
    """Whether a number may be looked at, to save a pass over the head's gradient where it is one.

    It costs nothing on a CPU. Who records operators (compilers, make_fx) or maps over numbers (vmap) must not see what
    hangs on one of them.
    """
    recorded = torch.compiler.is_compiling() or is_in_torch_dispatch_mode()
    return number.is_cpu and not recorded and not torch._C._functorch.is_legacy_batchedtensor(number)


def _add_product(total: Tensor, a: Tensor, b: Tensor, *, first: bool) -> None:
    """``total += a @ b``, or ``total = a @ b`` the first time."""
    if first:
        torch.mm(a, b, out=total) if a.dtype == total.dtype else total.copy_(a @ b)
    elif a.dtype == total.dtype:
        total.addmm_(a, b)
    else:
        total += a @ b
