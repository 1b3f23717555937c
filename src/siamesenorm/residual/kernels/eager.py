"""When an operator of ours may stand in for its plain form, and how it is differentiated twice."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad

PLAIN_TYPES = frozenset({Tensor, nn.Parameter, type(None)})


def runs_eager(*tensors: Tensor | None) -> bool:
    """Whether operators may run: eager mode, ordinary tensors, no transform that would need the plain form.

    Compilers fuse and recompute better on the plain form; DTensors, `torch.func`, forward-mode derivatives and traces
    that leave this process need ordinary operators.
    """
    if torch.compiler.is_compiling() or torch.jit.is_tracing():  # type: ignore[attr-defined]
        return False
    if torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0:
        return False
    return PLAIN_TYPES.issuperset(map(type, tensors))


def plain_gradients(
    plain: Callable[..., Any], inputs: Sequence[Tensor | None], grads: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Gradients of `plain` for those inputs that want them, in operators that can be differentiated again.

    What an operator's backward returns where somebody asked for `create_graph`.
    """
    present = [t for t in inputs if t is not None]

    def of_present(*given: Tensor) -> Any:
        left = iter(given)
        return plain(*(None if t is None else next(left) for t in inputs))

    # Not torch.autograd.grad: inputs that this very backward saved as outputs would send it around in circles.
    found = iter(torch.func.vjp(of_present, *present)[1](grads[0] if len(grads) == 1 else tuple(grads)))
    return tuple(None if t is None else next(found) for t in inputs)
