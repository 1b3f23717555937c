"""How an operator of ours is made known to torch: its schema, its kernels, its shapes, its derivative."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

NAMESPACE = "siamesenorm"
_library = torch.library.Library(NAMESPACE, "FRAGMENT")


def define(
    schema: str,
    *,
    cpu: Callable[..., Any],
    fake: Callable[..., Any],
    cuda: Callable[..., Any] | None = None,
    keep: Callable[..., None] | None = None,
    differentiate: Callable[..., Any] | None = None,
) -> None:
    """Define ``siamesenorm::name`` once; a second copy of this code (beside exported weights) finds it there.

    cpu, cuda: kernels. fake: tensors of the right shape, for compilers. keep, differentiate: what backward needs and
    does; without them the operator takes no gradient.
    """
    name = schema.partition("(")[0]
    if hasattr(getattr(torch.ops, NAMESPACE), name):
        return
    _library.define(schema)
    _library.impl(name, cpu, "CPU")
    if cuda is not None:
        _library.impl(name, cuda, "CUDA")
    torch.library.register_fake(f"{NAMESPACE}::{name}", fake, lib=_library)
    if differentiate is not None:
        torch.library.register_autograd(f"{NAMESPACE}::{name}", differentiate, setup_context=keep, lib=_library)
