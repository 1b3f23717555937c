"""Spreading a model over processes, from outside: the model's own code knows nothing of it.

| mode   | weights                                               | batch                    |
|--------|-------------------------------------------------------|--------------------------|
| none   | one process                                           |                          |
| ddp    | a copy in every process                               | a part for every process |
| fsdp   | shards over all processes, gathered block by block    | a part for every process |
| hsdp   | shards within a group, copies between groups          | a part for every process |
| tp     | heads and FFN columns split within a group, shards between groups | a part for every group |

Sharding goes by block: attention, FFN and links of a block are gathered together and freed together. The last norms
and the head stay gathered with the root for the whole pass. Streams keep their dtype between blocks; what is computed
in a lower one is autocast's. Blocks are compiled before they are sharded: the hooks that gather weights run outside.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections import defaultdict
from collections.abc import Iterable, Iterator
from shutil import which
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from siamesenorm.models.stack import Block, Stack
from siamesenorm.train.distributed import World
from siamesenorm.train.errors import ConfigError

MODES = ("none", "ddp", "fsdp", "hsdp", "tp")
WORTH_COMPILING = 2000
"""Steps on a CPU; a step of a small model is 2 to 12 % shorter when compiled (benchmarks/lm.py)."""


def apply_parallelism(
    model: nn.Module,
    world: World,
    strategy: str | None = None,
    *,
    dtype: torch.dtype | None = None,
    seed: int | None = None,
    compiled: bool = False,
) -> nn.Module:
    """The model, spread over the world; parameters are on its device already or will be moved there.

    strategy: one of the table's modes; default: the world's. dtype: what sharded blocks are gathered and computed
    in (gradients are summed in float32); default: that of the weights. compiled: whether blocks go through
    torch.compile. The optimiser is made afterwards.
    A model of ours on ``meta`` gets the first weights of `seed` here, part by part: every part is spread before the
    next is made, so that no process ever holds more than its own share and one block.
    """
    strategy = strategy or world.mode
    if strategy not in MODES:
        raise ConfigError(f"parallel.mode: {strategy!r} is not allowed; it takes {', '.join(MODES)}")
    if world.size == 1 or strategy == "none":
        if compiled:
            compile_model(model)
        return model.to(world.device)
    if strategy != world.mode:
        raise ConfigError(f"parallel.mode: the world was started for {world.mode!r}, not for {strategy!r}")
    if strategy == "ddp":
        model = model.to(world.device)
        if compiled:
            compile_model(model)
        devices = [world.device.index] if world.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
    spreading = Spreading(model, world, dtype, compiled)
    if isinstance(model, Stack) and next(model.parameters()).is_meta:
        model.init_weights(seed, around=spreading.made)
    else:
        for part in spreading.alone:
            spreading.part(part)
    return spreading.finish()


def compile_pays(device: torch.device, steps: int) -> bool:
    """Whether compiling, which takes from ten seconds to a minute once, is made up for by faster steps."""
    if device.type != "cpu":
        return True
    compilers = (os.environ.get("CXX"), "g++", "clang++", "c++")
    return steps >= WORTH_COMPILING and any(which(name) for name in compilers if name)


def compile_model(model: nn.Module) -> None:
    """Block by block where a model has blocks of ours, else as a whole."""
    if isinstance(model, Stack):
        model.compile_blocks()
    else:
        model.compile()


class Spreading:
    """Sharding by block (FSDP2), tensor parallelism, or both, one part of a model after the other."""

    def __init__(
        self, model: nn.Module, world: World, dtype: torch.dtype | None = None, compiled: bool = False
    ) -> None:
        self.model, self.device, self.compiled = model, world.device, compiled
        self.shards: DeviceMesh | None = world.mesh
        self.tensors: DeviceMesh | None = None
        if world.mode == "tp":
            if not isinstance(model, Stack):
                kind = type(model).__name__
                raise ConfigError(f"parallel.mode: 'tp' is not allowed for {kind}; it splits models of siamesenorm")
            self.shards, self.tensors = world.mesh["data"] if world.data_size > 1 else None, world.mesh["tensor"]
        # A linear layer with a bias returns a view; no topology writes over a sublayer's output.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        policy = MixedPrecisionPolicy(dtype, torch.float32 if dtype else None, cast_forward_inputs=False)
        self.alone: dict[nn.Module, MixedPrecisionPolicy] = dict.fromkeys(getattr(model, "blocks", ()), policy)
        embedding, head = getattr(model, "embedding", None), getattr(model, "head", None)
        if isinstance(embedding, nn.Module) and head is not None:
            self.alone[embedding] = MixedPrecisionPolicy(reduce_dtype=policy.reduce_dtype)

    @contextlib.contextmanager
    def made(self, part: nn.Module) -> Iterator[None]:
        """Memory for a part, which is filled inside; behind it, what other processes hold is given back."""
        part.to_empty(device="cpu", recurse=part is not self.model)  # where one process draws too
        yield
        self.part(part)

    def part(self, part: nn.Module) -> None:
        """Blocks and embedding by themselves; the rest waits for `finish`."""
        if self.tensors is not None and isinstance(part, Block):
            from siamesenorm.train.tensor_parallel import split_sublayers

            split_sublayers(part.to(self.device), self.tensors)
        if self.compiled and isinstance(part, Block):
            part.compile()
        if self.shards is not None and part in self.alone:
            fully_shard(part, mesh=self.shards, mp_policy=self.alone[part])

    def finish(self) -> nn.Module:
        """What is left of the model."""
        if self.shards is None:
            return self.model.to(self.device)
        fully_shard(self.model, mesh=self.shards)
        return self.model


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


@torch.no_grad()
def clip_gradients(model: nn.Module, max_norm: float) -> Tensor:
    """Scale all gradients so that their norm over the whole model is at most `max_norm`; returns it as it was."""
    parts = by_mesh(parameter.grad for parameter in model.parameters() if parameter.grad is not None)
    norms = [_norm(grads) for grads in parts]
    if not norms:
        return torch.zeros(())
    total = norms[0] if len(norms) == 1 else torch.linalg.vector_norm(torch.stack(norms))
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grads in parts:
        torch._foreach_mul_([g.to_local() if isinstance(g, DTensor) else g for g in grads], scale)
    return total


def _norm(grads: list[Tensor]) -> Tensor:
    norm = nn.utils.get_total_norm(grads)
    return norm.full_tensor() if isinstance(norm, DTensor) else norm
