"""How an operator of ours is made known to torch: its schema, its kernels, its shapes, its derivative."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import torch

# A copy of this code (beside exported weights) has operators of its own: it may be of another version, and lie where
# no compiled library is.
NAMESPACE = "siamesenorm" if __name__.startswith("siamesenorm.") else re.sub(r"\W", "_", __name__)
operators = SimpleNamespace()
"""Our operators by name, each its one overload: torch would look for it at every call."""
_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def define(
    schema: str,
    *,
    fake: Callable[..., Any],
    cpu: Callable[..., Any] | None = None,
    cuda: Callable[..., Any] | None = None,
    anywhere: Callable[..., Any] | None = None,
    keep: Callable[..., None] | None = None,
    differentiate: Callable[..., Any] | None = None,
    flops: Callable[..., int] | None = None,
) -> None:
    """Define ``siamesenorm::name``, to be called as ``operators.name``.

    cpu, cuda: kernels; anywhere: one for every device. fake: tensors of the right shape, for compilers. keep,
    differentiate: what backward needs and does; without them a gradient that is asked for is refused. flops: what FLOP
    counters count, from the shapes of the arguments.
    """
    name, known = schema.partition("(")[0], getattr(torch.ops, NAMESPACE)
    if hasattr(known, name):  # this module is being loaded again
        setattr(operators, name, getattr(known, name).default)
        return
    _library.define(schema)
    setattr(operators, name, getattr(known, name).default)
    for kernel, device in ((cpu, "CPU"), (cuda, "CUDA"), (anywhere, "CompositeExplicitAutograd")):
        if kernel is not None:
            _library.impl(name, kernel, device)
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    if "!)" not in schema:  # torch differentiates no operator that writes into its arguments
        differentiate = differentiate or _refuse(name)
        torch.library.register_autograd(f"{NAMESPACE}::{name}", differentiate, setup_context=keep, lib=_library)
    if flops is not None:
        from torch.utils.flop_counter import register_flop_formula  # which imports triton, if it is there

        register_flop_formula(getattr(known, name))(flops)


def _refuse(name: str) -> Callable[..., Any]:
    def refuse(*_: Any) -> Any:
        raise NotImplementedError(f"{NAMESPACE}::{name} has no derivative; its plain form has one")

    return refuse
