"""Whether a module has hooks: what stands in for its call must then give way to it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import nn

FORWARD = ("_forward_pre_hooks", "_forward_hooks")
BACKWARD = ("_backward_pre_hooks", "_backward_hooks")
KINDS = (*FORWARD, *BACKWARD)


def has_hooks(*modules: nn.Module | None) -> bool:
    """Whether any of the modules has hooks or a `forward` of its own, or every module has hooks."""
    for hooks in _EVERYWHERE:  # loops: this is asked dozens of times for every token that is decoded
        if hooks:
            return True
    for module in modules:
        if module is not None:
            own = module.__dict__
            if own["_forward_hooks"] or own["_forward_pre_hooks"] or "forward" in own:
                return True
            if own["_backward_hooks"] or own["_backward_pre_hooks"]:
                return True
    return False


def everywhere(kinds: Sequence[str] = KINDS) -> list[dict[int, Any]]:
    """The hooks that hang on every module there is, by kind."""
    return [getattr(nn.modules.module, f"_global{kind}") for kind in kinds]


_EVERYWHERE = everywhere()
