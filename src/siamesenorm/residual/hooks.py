"""Whether somebody watches a module: what stands in for its call must then stand aside."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

FORWARD = ("_forward_pre_hooks", "_forward_hooks")
BACKWARD = ("_backward_pre_hooks", "_backward_hooks")
KINDS = (*FORWARD, *BACKWARD)


def has_hooks(*modules: nn.Module | None) -> bool:
    """Whether any of the modules has hooks or a `forward` of its own, or every module has hooks."""
    if any(everywhere()):
        return True
    present = [vars(module) for module in modules if module is not None]
    return any("forward" in own or any(own[kind] for kind in KINDS) for own in present)


def everywhere(kinds: Sequence[str] = KINDS) -> list[dict[int, Any]]:
    """The hooks that hang on every module there is, by kind."""
    return [getattr(nn.modules.module, f"_global{kind}") for kind in kinds]
