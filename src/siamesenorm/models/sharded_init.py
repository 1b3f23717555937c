"""First weights of a model whose parameters lie in parts on several processes (DTensor): those of the whole."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from torch.distributed.tensor import DTensor

    from siamesenorm.models.init import PartContext

REORDERED = "row_order"
"""Attribute of a module whose rows were put into another order before they were split (train/tensor_layout.py)."""


def whole_parts(model: nn.Module, seed: int | None) -> PartContext:
    """What `init_weights` puts around every part, so that all of a sharded part lies in memory while it is filled.

    Nothing where no parameter is sharded. Raises where first weights could not be those of an unsharded model.
    """
    if all(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("init_weights: the model is on meta and has no memory; to_empty(device=…) gives it some")
    if not torch.distributed.is_available():
        return nullcontext
    from torch.distributed.fsdp import FSDPModule
    from torch.distributed.tensor import DTensor

    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()  # what a pass has gathered is thrown away at the next one, with all that is written to it
    if not any(isinstance(parameter, DTensor) for parameter in model.parameters()):
        return nullcontext
    if seed is None:
        raise ValueError(
            "init_weights: seed = None is not allowed for sharded parameters; processes must draw the same"
        )
    for name, module in model.named_modules():
        if getattr(module, REORDERED, None) is not None:
            raise ValueError(f"init_weights: the heads or columns of {name} are split already; fill the model before")

    @contextmanager
    def gathered(part: nn.Module) -> Iterator[None]:
        modules = [part] if part is model else list(part.modules())
        shards: list[tuple[nn.Module, str, Any]] = [
            (module, name, parameter)
            for module in modules
            for name, parameter in module._parameters.items()
            if isinstance(parameter, DTensor)
        ]
        full = [nn.Parameter(torch.empty(shard.shape, dtype=shard.dtype, device=shard.device)) for *_, shard in shards]
        for (module, name, _), whole in zip(shards, full, strict=True):
            module._parameters[name] = whole
        try:
            yield
        finally:
            for (module, name, shard), whole in zip(shards, full, strict=True):
                module._parameters[name] = shard
                _own_part(shard, whole.detach())

    return gathered


@torch.no_grad()
def _own_part(shard: DTensor, full: Tensor) -> None:
    """Copy what of a whole tensor this process holds."""
    from torch.distributed.tensor import distribute_tensor

    parts = distribute_tensor(full, shard.device_mesh, shard.placements, src_data_rank=None)
    shard.to_local().copy_(parts.to_local())
