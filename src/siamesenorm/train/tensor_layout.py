"""Rows of fused matrices, as they lie in a model and as they are stored.

Tensor parallelism gives every process its heads of q, k and v, and its part of SwiGLU's value and gate. Both lie
fused in one matrix, so that its rows are put into another order before it is split. Files always have the original
order: `stored` and `restore` go between the two.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

ROW_ORDER = "row_order"
"""Attribute of a module: row i of its parameters is row ``row_order[i]`` of the original matrix."""

WRAPPERS = ("module", "_orig_mod", "_checkpoint_wrapped_module")


STAGES = "pipeline_stages"
"""Where a process of a pipeline has its stages, by number."""


def plain_name(name: str) -> str:
    """A parameter's name without the prefixes of DDP, pipelines, torch.compile and activation checkpointing."""
    parts = name.split(".")
    parts = parts[2:] if parts[0] == STAGES else parts
    return ".".join(part for i, part in enumerate(parts) if not (part in WRAPPERS[1:] or (i == 0 and part == "module")))


def unwrap(model: nn.Module) -> nn.Module:
    """The model inside DDP and torch.compile; of a pipeline, what this process has of it."""
    while isinstance(inner := model._modules.get("module") or model._modules.get("_orig_mod"), nn.Module):
        model = inner
    division: Any = getattr(model, "division", None) if hasattr(model, STAGES) else None
    return model if division is None else division.model


def row_orders(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Names of the parameters whose rows lie in another order, and that order."""
    for prefix, module in unwrap(model).named_modules():
        order = getattr(module, ROW_ORDER, None)
        if order is not None:
            for name, _ in module.named_parameters(recurse=False):
                yield plain_name(f"{prefix}.{name}"), order


def whole(tensor: Tensor) -> Tensor:
    """The full tensor on every process that holds a part of it."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def stored_rows(tensor: Tensor, order: Tensor) -> Tensor:
    """A full tensor with its rows in the original order."""
    return torch.empty_like(tensor).index_copy_(0, order.to(tensor.device), tensor)


def stored(tensor: Tensor, order: Tensor | None) -> Tensor:
    """The tensor as it goes into files: rows in the original order, split evenly over the processes."""
    if order is None:
        return tensor
    full = stored_rows(whole(tensor.detach()), order)
    if not isinstance(tensor, DTensor):
        return full
    mesh = tensor.device_mesh
    copies = DTensor.from_local(full, mesh, [Replicate()] * mesh.ndim, run_check=False)
    return copies.redistribute(placements=[Shard(0)] * mesh.ndim)


def template(tensor: Tensor, order: Tensor | None) -> Tensor:
    """What to read into: the tensor itself, or one in the files' layout for `restore`."""
    return tensor.detach() if order is None else stored(torch.zeros_like(tensor), order)


@torch.no_grad()
def restore(read: Tensor, tensor: Tensor, order: Tensor | None) -> None:
    """Put what was read into the `template` back into the tensor."""
    if order is not None:
        place(whole(read), tensor, order)


@torch.no_grad()
def place(full: Tensor, tensor: Tensor, order: Tensor | None) -> None:
    """Put a whole tensor, its rows in the original order, into one of a model, or this process's part of it."""
    full = full if order is None else full[order.to(full.device)]
    local(tensor).copy_(own_part(full, tensor))


def local(tensor: Tensor) -> Tensor:
    """What this process holds of a tensor, sharing its memory."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def own_part(full: Tensor, tensor: Tensor) -> Tensor:
    """What of a full tensor lies where this process holds its part of another one of the same shape."""
    if not isinstance(tensor, DTensor):
        return full
    shape, offset = compute_local_shape_and_global_offset(tensor.shape, tensor.device_mesh, tensor.placements)
    return full[tuple(slice(o, o + n) for o, n in zip(offset, shape, strict=True))]
