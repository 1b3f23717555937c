"""What autograd keeps of a forward pass: the activations that a topology costs."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


def saved_bytes(model: nn.Module, *inputs: Any) -> int:
    """Bytes of all distinct storages that autograd keeps for backward, parameters left out."""
    kept: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    alive = []

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(t)  # a freed storage's address could come again
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        model(*inputs)
    return sum(kept.values())
