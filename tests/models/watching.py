"""Hooks of every kind on every module, and what they saw."""

from collections import Counter

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from siamesenorm.residual import Topology

KINDS = ("forward_pre", "forward", "full_backward_pre", "full_backward")


def called_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Every module that is called in a pass: all but lists, and topologies, which models open and close."""
    containers = (nn.ModuleList, nn.ModuleDict, Topology)
    return {name: module for name, module in model.named_modules() if not isinstance(module, containers)}


class Watch:
    """Counts calls of hooks by kind and module, and those that saw no tensor."""

    def __init__(self, modules: dict[str, nn.Module], kinds: tuple[str, ...] = KINDS) -> None:
        self.fired: dict[str, Counter[str]] = {kind: Counter() for kind in kinds}
        self.blind: list[tuple[str, str]] = []
        self.handles = [
            getattr(module, f"register_{kind}_hook")(self._hook(kind, name))
            for kind in kinds
            for name, module in modules.items()
        ]

    def _hook(self, kind: str, name: str):
        def look(module: nn.Module, *seen: object) -> None:
            self.fired[kind][name] += 1
            for part in seen:
                if not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(part)) and "backward" not in kind:
                    self.blind.append((kind, name))
            if "backward" in kind and not any(isinstance(leaf, Tensor) for leaf in pytree.tree_leaves(seen)):
                self.blind.append((kind, name))

        return look

    def remove(self) -> None:
        for handle in self.handles:
            handle.remove()


def flat_gradients(model: nn.Module, loss: Tensor) -> Tensor:
    grads = torch.autograd.grad(loss, list(model.parameters()), allow_unused=True, materialize_grads=True)
    return torch.cat([g.flatten() for g in grads])
