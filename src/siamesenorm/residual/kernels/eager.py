"""When an operator of ours may stand in for its plain form, and how it is differentiated twice."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.jit._trace import is_tracing

PLAIN_TYPES = frozenset({Tensor, nn.Parameter, type(None)})
_types = PLAIN_TYPES
_device: str | None = None


@contextlib.contextmanager
def planned_for(device: str, *types: type[Tensor]) -> Iterator[None]:
    """Inside, tensors of these types, which have shapes and no values, take the operators that ``device`` runs.

    Memory and work of a step are counted in this way, of a GPU too where there is none: ``cpu`` or ``cuda``.
    """
    global _types, _device
    before = _types, _device
    _types, _device = PLAIN_TYPES | set(types), device
    try:
        yield
    finally:
        _types, _device = before


def planned() -> str | None:
    """The device that a step is being planned for; None where steps are real."""
    return _device


def runs_eager(*tensors: Tensor | None) -> bool:
    """Whether operators may run: eager mode, ordinary tensors, no transform that would need the plain form.

    Compilers fuse and recompute better on the plain form; DTensors need ordinary operators.
    """
    return not torch.compiler.is_compiling() and not transformed() and _types.issuperset(map(type, tensors))


def transformed() -> bool:
    """Whether `torch.func`, forward-mode derivatives or a trace that leaves this process need ordinary operators."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0 or is_tracing()


def is_batched(tensor: Tensor) -> bool:
    """Whether `vmap`, at any level, runs over a tensor, so that no number of it can be read."""
    while torch._C._functorch.is_functorch_wrapped_tensor(tensor):
        if torch._C._functorch.is_batchedtensor(tensor):
            return True
        tensor = torch._C._functorch.get_unwrapped(tensor)
    return False


def wants_plain_backward() -> bool:
    """Whether the backward pass that runs now is differentiated again (``create_graph``) or mapped over (`vmap`)."""
    return (torch.is_grad_enabled() or transformed()) and not torch.compiler.is_compiling()


def plain_gradients(
    plain: Callable[..., Any], inputs: Sequence[Tensor | None], grads: Sequence[Tensor]
) -> tuple[Tensor | None, ...]:
    """Gradients of `plain` for the inputs that are there, in operators that can be differentiated again.

    What an operator's backward returns where `wants_plain_backward`.
    """
    present = [t for t in inputs if t is not None]

    def of_present(*given: Tensor) -> Any:
        left = iter(given)
        return plain(*(None if t is None else next(left) for t in inputs))

    # Not torch.autograd.grad: inputs that this very backward saved as outputs would send it around in circles.
    found = iter(torch.func.vjp(of_present, *present)[1](grads[0] if len(grads) == 1 else tuple(grads)))
    return tuple(None if t is None else next(found) for t in inputs)
