"""Topologies as linear maps: inside `frozen`, what gates and norms compute from the streams is constant to autograd.

Gates come out of a sigmoid, a softmax or a tanh, and norms divide by a root. With these held as they are, reads and
writes are linear in the streams and in the sublayers' outputs (affine where there are biases), for every topology.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import forward_ad
from torch.overrides import TorchFunctionMode

HELD = frozenset(
    getattr(owner, name)
    for name in ("sigmoid", "softmax", "log_softmax", "tanh", "exp", "sqrt", "rsqrt", "silu", "gelu", "relu")
    for owner in (torch, Tensor, F)
    if hasattr(owner, name)
)
"""Functions whose results are constants."""


@contextmanager
def frozen() -> Iterator[None]:
    """Derivatives inside are those of the linear map: gates and the statistics of norms have none."""
    with forward_ad.dual_level(), _Held():  # under a dual level our norms run in ordinary operators
        yield


class _Held(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if function in HELD:
            return function(*args, **kwargs).detach()
        if function is F.rms_norm:
            return _rms_norm(*args, **kwargs)
        if function is F.layer_norm:
            return _layer_norm(*args, **kwargs)
        return function(*args, **kwargs)


def _rms_norm(input: Tensor, normalized_shape: Any, weight: Tensor | None = None, eps: float | None = None) -> Tensor:
    eps = torch.finfo(input.dtype).eps if eps is None else eps
    dims = tuple(range(-len(normalized_shape), 0))
    out = input * torch.rsqrt(input.square().mean(dims, keepdim=True) + eps).detach()
    return out if weight is None else out * weight


def _layer_norm(
    input: Tensor, normalized_shape: Any, weight: Tensor | None = None, bias: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    dims = tuple(range(-len(normalized_shape), 0))
    centred = input - input.mean(dims, keepdim=True)
    out = centred * torch.rsqrt(centred.square().mean(dims, keepdim=True) + eps).detach()
    out = out if weight is None else out * weight
    return out if bias is None else out + bias


def images(function: Callable[[Tensor], Tensor], parts: Sequence[Tensor]) -> list[Tensor]:
    """What a function makes of a sum, part by part: the parts through the linear map that it is at their sum.

    They add up to ``function(sum(parts))``; what no part makes, a bias, goes to all of them alike.
    """
    total = sum(parts[1:], parts[0]).detach().requires_grad_()
    with torch.enable_grad(), frozen():
        result = function(total)
        along = torch.zeros_like(result, requires_grad=True)
        (gradient,) = torch.autograd.grad(result, total, along, create_graph=True)  # linear in `along`
        found = [torch.autograd.grad(gradient, along, part.detach(), retain_graph=True)[0] for part in parts]
    rest = (result.detach() - sum(found[1:], found[0])) / len(found)
    return [part + rest for part in found]
