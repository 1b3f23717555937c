"""Gradients of a model that is spread over processes: when they are summed, and their norm over the whole model."""

from __future__ import annotations

import contextlib
from collections import defaultdict
from collections.abc import Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from siamesenorm.train.parallel.pipeline import Pipeline
from siamesenorm.train.tensor_layout import local, whole


@contextlib.contextmanager
def gradient_sync(model: nn.Module, enabled: bool) -> Iterator[None]:
    """Backward inside sums gradients over processes or, where several parts of a batch follow, does not yet."""
    if enabled:
        yield
    elif isinstance(model, DistributedDataParallel):
        with model.no_sync():
            yield
    elif isinstance(model, FSDPModule):
        model.set_requires_gradient_sync(False)
        try:
            yield
        finally:
            model.set_requires_gradient_sync(True)
    else:
        yield


def uniform_groups(groups: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Parameter groups split so that each holds parameters of one mesh only, as an optimiser's fused kernels need."""
    return [{**group, "params": part} for group in groups for part in by_mesh(group["params"])]


def by_mesh(tensors: Iterable[Tensor]) -> list[list[Tensor]]:
    """Tensors apart by what they are sharded over, so that the kernels for many at once can take each list."""
    parts: dict[Any, list[Tensor]] = defaultdict(list)
    for tensor in tensors:
        parts[tensor.device_mesh if isinstance(tensor, DTensor) else None].append(tensor)
    return list(parts.values())


def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale all gradients so that their norm over the whole model is at most `max_norm`; returns it as it was."""
    return clip(model.parameters(), max_norm, model.group if isinstance(model, Pipeline) else None)


@torch.no_grad()
def clip(parameters: Iterable[Tensor], max_norm: float, stages: dist.ProcessGroup | None = None) -> Tensor:
    """The same of any parameters, whatever meshes these lie on, and of those of other stages of a pipeline."""
    parts = by_mesh(parameter.grad for parameter in parameters if parameter.grad is not None)
    norms = [whole(nn.utils.get_total_norm(grads)) for grads in parts]
    if not norms:
        return torch.zeros(())
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    if stages is not None:
        squares = total.square()
        dist.all_reduce(squares, group=stages)
        total = squares.sqrt()
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grads in parts:
        torch._foreach_mul_([local(grad) for grad in grads], scale)
    return total
