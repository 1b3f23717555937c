"""Projections whose rows are grouped by expert, and the way of tokens there and back.

A token that chose k experts fills k slots. Slots are sorted by expert, so that each expert owns one contiguous
slice and runs once on it; experts with no slot are not run. Slicing stacked weights under autograd would give every
expert a zero gradient as large as all experts together, so the projection is one operator that writes each
expert's gradient into its own slice. Its shapes do not depend on the routing, which is why `torch.compile` takes
it without a graph break.
"""

from __future__ import annotations

from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor
from torch.jit._trace import is_tracing

from siamesenorm.residual.kernels.eager import is_batched, plain_gradients, runs_eager, wants_plain_backward
from siamesenorm.residual.kernels.operator import define, operators


class Slots(NamedTuple):
    """Where every (token, choice) lies after sorting by expert."""

    token: Tensor
    """(slots,): the token of each slot."""
    of_token: Tensor
    """(tokens, k): the slots of each token."""
    ends: Tensor
    """(experts,): where each expert's slice ends."""


def sort_slots(chosen: Tensor, experts: int) -> tuple[Slots, Tensor]:
    """Slots for the (tokens, k) chosen experts, and the order that puts flattened choices into them."""
    k = chosen.shape[1]
    by_expert, order = chosen.flatten().sort(stable=True)
    ends = torch.searchsorted(by_expert, torch.arange(experts, device=chosen.device), right=True)
    of_token = torch.empty_like(order).scatter_(0, order, torch.arange(order.shape[0], device=order.device))
    return Slots(order // k, of_token.view(chosen.shape), ends), order


# A token's k slots, added up --------------------------------------------------------------------------------


def _add_slots(values: Tensor, of_token: Tensor) -> Tensor:
    if values.device.type == "cpu" and runs_eager(values) and values.shape[0]:
        return F.embedding_bag(of_token, values, mode="sum")  # gathers and adds in one pass
    return values.index_select(0, of_token.flatten()).unflatten(0, of_token.shape).sum(1)


class _AddSlots(torch.autograd.Function):
    """Each slot belongs to one token, so the gradient is a gather and needs no atomic additions."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, token: Tensor, of_token: Tensor) -> Tensor:
        ctx.save_for_backward(token)
        return _add_slots(values, of_token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (token,) = ctx.saved_tensors
        return grad.index_select(0, token), None, None


def add_slots(values: Tensor, slots: Slots) -> Tensor:
    """(slots, d) to (tokens, d): the sum over each token's slots."""
    if runs_eager(values):
        return _AddSlots.apply(values, slots.token, slots.of_token)
    return _add_slots(values, slots.of_token)


class _SpreadSlots(torch.autograd.Function):
    """The way there, whose gradient is the way back."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, token: Tensor, of_token: Tensor) -> Tensor:
        ctx.save_for_backward(of_token)
        return values.index_select(0, token)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        (of_token,) = ctx.saved_tensors
        return _add_slots(grad, of_token), None, None


def spread_slots(values: Tensor, slots: Slots) -> Tensor:
    """(tokens, d) to (slots, d): each slot has its token's row."""
    return _SpreadSlots.apply(values, slots.token, slots.of_token)


# The projection ---------------------------------------------------------------------------------------------


def grouped_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, slots: Slots, *, dispatch: bool, dtype: torch.dtype | None = None
) -> Tensor:
    """Each expert's slice of `x` times its own weight: (slots, in) and (experts, out, in) to (slots, out).

    With `dispatch`, `x` holds tokens and each slot reads its token's row; the gathered copy is not kept for
    backward. `dtype` is what is computed in (autocast), by default that of `x`.
    """
    x = x.to(dtype or x.dtype)
    if has_grouped_mm(x, weight):
        rows = x.index_select(0, slots.token) if dispatch else x
        out = F.grouped_mm(rows, weight.to(x.dtype).transpose(1, 2), offs=slots.ends.to(torch.int32))
        return out if bias is None else out + _expert_rows(bias, slots).to(x.dtype)
    token, of_token = (slots.token, slots.of_token) if dispatch else (None, None)
    # Fake tensors take the operator, which has a shape whatever the routing is.
    if not torch.compiler.is_compiling() and not isinstance(x, FakeTensor) and not runs_eager(x, weight, bias):
        return plain(x, weight, bias, slots.ends, token)
    return operators.grouped_linear(x, weight, bias, slots.ends, token, of_token)


def has_grouped_mm(x: Tensor, weight: Tensor) -> bool:
    """Whether one kernel runs all experts without asking the device for their sizes."""
    aligned = x.shape[-1] % 8 == 0 and weight.shape[1] % 8 == 0
    return x.is_cuda and x.dtype == torch.bfloat16 and aligned and hasattr(F, "grouped_mm")


def plain(x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, token: Tensor | None) -> Tensor:
    """The projection in ordinary operators: for `torch.func`, traces and second derivatives."""
    rows = x if token is None else x.index_select(0, token)
    weight, bias = weight.to(rows.dtype), None if bias is None else bias.to(rows.dtype)
    if is_tracing() or is_batched(ends):
        return _by_every_expert(rows, weight, bias, ends)
    sizes = ends.diff(prepend=ends.new_zeros(1)).tolist()
    biases = [None] * weight.shape[0] if bias is None else bias.unbind()
    experts = zip(rows.split(sizes), weight.unbind(), biases, strict=True)
    return torch.cat([F.linear(part, w, b) for part, w, b in experts])


def _by_every_expert(rows: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor) -> Tensor:
    """Every row through every expert, for want of sizes: in a trace and under `vmap` no number may be read."""
    outputs = rows @ weight.transpose(1, 2)  # (experts, slots, out)
    outputs = outputs if bias is None else outputs + bias.unsqueeze(1)
    expert = torch.searchsorted(ends, torch.arange(rows.shape[0], device=rows.device), right=True)
    return outputs.gather(0, expert.view(1, -1, 1).expand(1, -1, outputs.shape[2])).squeeze(0)


def _expert_rows(bias: Tensor, slots: Slots) -> Tensor:
    """Each slot's row of `bias`, as a product so that its gradient is a deterministic sum."""
    slot = torch.arange(slots.token.shape[0], device=bias.device)
    expert = torch.searchsorted(slots.ends, slot, right=True)
    return F.one_hot(expert, bias.shape[0]).to(bias.dtype) @ bias


def _slices(ends: Tensor) -> list[tuple[int, int, int]]:
    """(expert, start, end) of every expert, in order."""
    stops: list[int] = ends.tolist()
    return [(e, start, stop) for e, (start, stop) in enumerate(zip([0, *stops[:-1]], stops, strict=True))]


def _forward(
    x: Tensor, weight: Tensor, bias: Tensor | None, ends: Tensor, token: Tensor | None, of_token: Tensor | None
) -> Tensor:
    rows = x if token is None else x.index_select(0, token)
    out = rows.new_empty(rows.shape[0], weight.shape[1])
    for e, start, stop in _slices(ends):
        if start == stop:
            continue
        matrix, to = weight[e].to(x.dtype).t(), out[start:stop]
        if bias is None:
            torch.mm(rows[start:stop], matrix, out=to)
        else:
            torch.addmm(bias[e].to(x.dtype), rows[start:stop], matrix, out=to)
    return out


def _backward(
    grad: Tensor,
    x: Tensor,
    weight: Tensor,
    ends: Tensor,
    token: Tensor | None,
    of_token: Tensor | None,
    wants_x: bool,
    wants_weight: bool,
    wants_bias: bool,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of input, weight and bias; one that is not wanted comes back empty."""
    grad = grad.contiguous()
    rows = x if token is None or not wants_weight else x.index_select(0, token)
    grad_rows = x.new_empty(grad.shape[0] if wants_x else 0, x.shape[1])
    grad_weight = torch.empty_like(weight) if wants_weight else weight.new_empty(0)
    grad_bias = weight.new_zeros(weight.shape[:2]) if wants_bias else weight.new_empty(0)
    for e, start, stop in _slices(ends):
        if start == stop:
            if wants_weight:
                grad_weight[e].zero_()
            continue
        g = grad[start:stop]
        if wants_x:
            torch.mm(g, weight[e].to(g.dtype), out=grad_rows[start:stop])
        if wants_weight and weight.dtype == g.dtype:
            torch.mm(g.t(), rows[start:stop], out=grad_weight[e])
        elif wants_weight:
            grad_weight[e].copy_(g.t() @ rows[start:stop])
        if wants_bias:
            torch.sum(g, 0, dtype=weight.dtype, out=grad_bias[e])
    if wants_x and of_token is not None:
        grad_rows = _add_slots(grad_rows, of_token)
    return grad_rows, grad_weight, grad_bias


def _forward_shapes(x: Tensor, weight: Tensor, bias: Any, ends: Tensor, token: Any, of_token: Any) -> Tensor:
    return x.new_empty((x if token is None else token).shape[0], weight.shape[1])


def _backward_shapes(grad: Any, x: Any, weight: Any, ends: Any, token: Any, of_token: Any, *wants: bool) -> Any:
    return (
        torch.empty_like(x, memory_format=torch.contiguous_format) if wants[0] else x.new_empty(0, x.shape[1]),
        torch.empty_like(weight) if wants[1] else weight.new_empty(0),
        weight.new_empty(weight.shape[:2]) if wants[2] else weight.new_empty(0),
    )


def _keep(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    x, weight, bias, ends, token, of_token = inputs
    ctx.save_for_backward(x, weight, bias, ends, token, of_token)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    wants = ctx.needs_input_grad[:3]
    x, weight, bias, ends, token, of_token = ctx.saved_tensors
    if wants_plain_backward():
        found = plain_gradients(partial(plain, ends=ends, token=token), (x, weight, bias), (grad,))
        return *found, None, None, None
    grads = operators.grouped_linear_backward(grad, x, weight, ends, token, of_token, *wants)
    return *(g if wanted else None for g, wanted in zip(grads, wants, strict=True)), None, None, None


def _forward_flops(x: Any, weight: Any, *_: Any, out_shape: Any, **__: Any) -> int:
    return int(2 * out_shape[0] * weight[1] * weight[2])


def _backward_flops(
    grad: Any, x: Any, weight: Any, ends: Any, token: Any, of_token: Any, *wants: bool, **_: Any
) -> int:
    return int(2 * grad[0] * weight[1] * weight[2] * sum(wants[:2]))


define(
    "grouped_linear_backward(Tensor grad, Tensor x, Tensor weight, Tensor ends, Tensor? token, Tensor? of_token, "
    "bool wants_x, bool wants_weight, bool wants_bias) -> (Tensor, Tensor, Tensor)",
    anywhere=_backward,
    fake=_backward_shapes,
    flops=_backward_flops,
)
define(
    "grouped_linear(Tensor x, Tensor weight, Tensor? bias, Tensor ends, Tensor? token, Tensor? of_token) -> Tensor",
    anywhere=_forward,
    fake=_forward_shapes,
    keep=_keep,
    differentiate=_differentiate,
    flops=_forward_flops,
)
