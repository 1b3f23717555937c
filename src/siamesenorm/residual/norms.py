"""Norms: RMSNorm and LayerNorm, with or without affine, as modules and as a forward/backward pair of functions.

The functions exist because a fused step (``residual/fused``) normalises inside one autograd node and must
run the backward of a norm itself. The modules use the same pair, so that both agree to the last bit.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from siamesenorm.residual import native
from siamesenorm.residual.errors import TopologyError, shown

NormKind = Literal["rms", "layer"]
NormRole = Literal["input", "stream", "final"]
LOW_PRECISION = (torch.bfloat16, torch.float16)
PLAIN_TYPES = frozenset({Tensor, nn.Parameter, type(None)})


class Stats(NamedTuple):
    """What a norm's backward needs beside its input: the row means (None for RMSNorm) and 1/deviation."""

    mean: Tensor | None
    rstd: Tensor


class NormCall(NamedTuple):
    """A norm without its parameters."""

    kind: NormKind
    eps: float


def normalize(
    x: Tensor, call: NormCall, weight: Tensor | None, bias: Tensor | None, *, inplace: bool = False
) -> tuple[Tensor, Stats]:
    """Norm over the last dimension and the statistics for `normalize_backward`; no graph is recorded.

    Low-precision input is normalised in float32 and returned in its own dtype. `inplace` lets RMSNorm write over
    x: on CPU, fresh memory costs more than the arithmetic.
    """
    dim = x.shape[-1]
    if native.usable(x, weight, bias):
        return _native_normalize(x, call, weight, bias, inplace)
    values = x.float() if x.dtype in LOW_PRECISION else x
    if call.kind == "layer":
        weight, bias = _cast(weight, values), _cast(bias, values)
        out, mean, rstd = torch.native_layer_norm(values, (dim,), weight, bias, call.eps)
        return out.to(x.dtype), Stats(mean, rstd)
    # Two passes over x where F.rms_norm on CPU runs a chain of pow, mean, rsqrt and two products.
    length = torch.linalg.vector_norm(values, dim=-1, keepdim=True)
    stats = Stats(None, torch.addcmul(length.new_tensor(call.eps), length, length, value=1 / dim).rsqrt_())
    return renormalize(x, stats, weight, bias, inplace=inplace), stats


def normalize_only(x: Tensor, call: NormCall, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """`normalize` without the statistics."""
    if native.usable(x, weight, bias):
        x = x.contiguous()
        return _native_forward(x, torch.empty_like(x), call, weight, bias)
    return normalize(x, call, weight, bias)[0]


def renormalize(
    x: Tensor, stats: Stats, weight: Tensor | None, bias: Tensor | None, *, inplace: bool = False
) -> Tensor:
    """`normalize` again with the statistics it returned."""
    values = x.float() if x.dtype in LOW_PRECISION else x
    centred = values if stats.mean is None else values - stats.mean
    out = centred.mul_(stats.rstd) if inplace or centred is not x else centred * stats.rstd
    if weight is not None:
        out.mul_(weight)
    if bias is not None:
        out.add_(bias)
    return out.to(x.dtype)


def normalize_backward(
    grad: Tensor, x: Tensor, stats: Stats, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Gradients of `normalize` for its input, weight and bias, the input's first."""
    dim = x.shape[-1]
    if native.usable(grad, x, weight, bias):
        return _native_backward(grad, x, stats, weight, bias)
    values, dtype = (x.float(), x.dtype) if x.dtype in LOW_PRECISION else (x, x.dtype)
    grad, gain = grad.to(values.dtype).contiguous(), _cast(weight, values)
    mean = torch.zeros_like(stats.rstd) if stats.mean is None else stats.mean
    # bias gradients are the sum of grad, whatever the kind; the native kernel wants a bias to return them.
    shift = _cast(bias, values) if bias is not None else None
    wanted = [True, weight is not None, bias is not None]
    gx, gw, gb = torch.ops.aten.native_layer_norm_backward(grad, values, (dim,), mean, stats.rstd, gain, shift, wanted)
    if stats.mean is None:
        # LayerNorm's input gradient also removes the row mean of (grad * gain); RMSNorm's does not: put it back.
        row = (grad if gain is None else grad * gain).sum(-1, keepdim=True)  # not a product: autocast would round it
        gx.add_(row.div_(dim).mul_(stats.rstd))
    gw = None if weight is None else gw.to(weight.dtype)
    gb = None if bias is None else gb.to(bias.dtype)
    return gx.to(dtype), gw, gb


def _native_normalize(
    x: Tensor, call: NormCall, weight: Tensor | None, bias: Tensor | None, inplace: bool
) -> tuple[Tensor, Stats]:
    x = x.contiguous()
    stats = empty_stats(x, call.kind)
    return _native_forward(x, x if inplace else torch.empty_like(x), call, weight, bias, *stats), stats


def _native_forward(
    x: Tensor, out: Tensor, call: NormCall, weight: Tensor | None, bias: Tensor | None, *stats: Tensor | None
) -> Tensor:
    norm = native.norm_args(call.kind == "layer", call.eps, weight, bias, *stats)
    arguments = native.NormCallArgs(*native.size_of(x), norm, x.data_ptr(), None, out.data_ptr())
    native.call("norm_forward", arguments)
    return out


def _native_backward(
    grad: Tensor, x: Tensor, stats: Stats, weight: Tensor | None, bias: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    grad, x = grad.contiguous(), x.contiguous()
    out, gw, gb = torch.empty_like(x), empty_like(weight), empty_like(bias)
    norm = native.norm_args(stats.mean is not None, 0.0, weight, bias, *stats, gw, gb)
    arguments = native.NormCallArgs(*native.size_of(x), norm, x.data_ptr(), grad.data_ptr(), out.data_ptr())
    native.call("norm_backward", arguments)
    return out, gw, gb


def empty_stats(x: Tensor, kind: NormKind) -> Stats:
    """Room for the statistics of x's rows."""
    rstd = x.new_empty((*x.shape[:-1], 1))
    return Stats(torch.empty_like(rstd) if kind == "layer" else None, rstd)


def empty_like(parameter: Tensor | None) -> Tensor | None:
    """Room for a parameter's gradient."""
    return None if parameter is None else torch.empty_like(parameter)


def _cast(parameter: Tensor | None, like: Tensor) -> Tensor | None:
    return None if parameter is None else parameter.to(like.dtype)


class _LeanRMSNorm(torch.autograd.Function):
    """RMSNorm that keeps its input and one number a row for backward, nothing else."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float) -> Tensor:
        out, stats = normalize(x, NormCall("rms", eps), weight, bias)
        ctx.save_for_backward(x, weight, bias, stats.rstd)
        ctx.eps = eps
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, rstd = ctx.saved_tensors
        if torch.is_grad_enabled():  # create_graph: somebody will differentiate this again
            return _twice_differentiable(grad, x, weight, bias, ctx.eps)
        return *normalize_backward(grad, x, Stats(None, rstd), weight, bias), None


def _twice_differentiable(
    grad: Tensor, x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor | None, ...]:
    out = F.rms_norm(x, x.shape[-1:], weight, eps)
    wanted = [t for t in (x, weight) if t is not None and t.requires_grad]
    grads = dict(zip(map(id, wanted), torch.autograd.grad(out, wanted, grad, create_graph=True), strict=True))
    grad_bias = None if bias is None else grad.sum_to_size(bias.shape)
    return grads.get(id(x)), None if weight is None else grads.get(id(weight)), grad_bias, None


def runs_plain_eager(*tensors: Tensor | None) -> bool:
    """Whether hand-written autograd nodes may run: eager mode, ordinary tensors, no torch.func transform.

    Compilers fuse and recompute better on the plain form; DTensors and functorch need ordinary operators.
    """
    if torch.compiler.is_compiling():
        return False
    if getattr(torch._C, "_are_functorch_transforms_active", lambda: False)():
        return False
    return PLAIN_TYPES.issuperset(map(type, tensors))


class Norm(nn.Module):
    """One norm over the last dimension, with its own gain (and, for LayerNorm, bias)."""

    kind: NormKind

    def __init__(self, dim: int, eps: float = 1e-5, affine: bool = True, bias: bool = False) -> None:
        super().__init__()
        self.dim, self.eps = dim, eps
        self.weight = nn.Parameter(torch.empty(dim)) if affine else None
        self.bias = nn.Parameter(torch.empty(dim)) if affine and bias else None
        self.reset_parameters()

    @property
    def call(self) -> NormCall:
        """Kind and eps, for `normalize`."""
        return NormCall(self.kind, self.eps)

    def reset_parameters(self) -> None:
        """Gain 1, bias 0."""
        if self.weight is not None:
            nn.init.ones_(self.weight)
        if self.bias is not None:
            nn.init.zeros_(self.bias)

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"{self.dim}, eps={self.eps}, affine={self.weight is not None}, bias={self.bias is not None}"


class RMSNorm(Norm):
    """x / sqrt(mean(x^2) + eps) * weight."""

    kind: NormKind = "rms"

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension; float32 inside for low-precision input."""
        weight, bias = self.weight, self.bias
        if x.is_cpu and runs_plain_eager(x, weight):
            if not torch.is_grad_enabled():  # the node costs more than one token's arithmetic
                return normalize_only(x, self.call, weight, bias)
            return _LeanRMSNorm.apply(x, weight, bias, self.eps)
        values = x.float() if x.dtype in LOW_PRECISION else x
        out = F.rms_norm(values, (self.dim,), _cast(weight, values), self.eps)
        return (out if bias is None else out + bias).to(x.dtype)


class LayerNorm(Norm):
    """(x - mean(x)) / sqrt(var(x) + eps) * weight + bias."""

    kind: NormKind = "layer"

    def forward(self, x: Tensor) -> Tensor:
        """Normalise the last dimension; float32 inside for low-precision input."""
        values = x.float() if x.dtype in LOW_PRECISION else x
        weight, bias = _cast(self.weight, values), _cast(self.bias, values)
        return F.layer_norm(values, (self.dim,), weight, bias, self.eps).to(x.dtype)


NORM_CLASSES: dict[str, type[Norm]] = {"rms": RMSNorm, "layer": LayerNorm}


@dataclass(frozen=True)
class NormSpec:
    """How to make a norm. ``bias=None`` means what is usual: with LayerNorm, without for RMSNorm."""

    kind: NormKind = "rms"
    eps: float = 1e-5
    affine: bool = True
    bias: bool | None = None

    def __post_init__(self) -> None:
        if self.kind not in NORM_CLASSES:
            raise TopologyError(f"norm: unknown kind {shown(self.kind)}; known kinds: {', '.join(NORM_CLASSES)}")

    def __call__(self, dim: int) -> Norm:
        """A fresh norm of width `dim`."""
        bias = self.kind == "layer" if self.bias is None else self.bias
        return NORM_CLASSES[self.kind](dim, eps=self.eps, affine=self.affine, bias=bias)


NormFactory = Callable[[int], nn.Module]
NormLike = str | NormFactory


@dataclass(frozen=True)
class Norms:
    """Norm factories by role.

    ``input``: the last norm before a sublayer; conditioned models (adaLN) modulate its output, so they want
    it without affine. ``stream``: a norm on a residual stream. ``final``: the last norm of the stack.
    """

    stream: NormFactory
    input: NormFactory
    final: NormFactory

    @classmethod
    def of(cls, norm: NormLike | Norms) -> Norms:
        """From a kind ("rms", "layer"), one factory for all roles, or a ready `Norms`."""
        if isinstance(norm, Norms):
            return norm
        if isinstance(norm, str):
            norm = NormSpec(norm)  # type: ignore[arg-type]  # NormSpec names the allowed kinds itself
        if not callable(norm):
            raise TopologyError(
                f"norm: {shown(norm)} is neither one of {', '.join(NORM_CLASSES)} nor a function from width to module"
            )
        return cls(stream=norm, input=norm, final=norm)
