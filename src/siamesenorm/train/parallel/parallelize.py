"""Spreading a model over processes, from outside: the model's own code knows nothing of it.

| mode   | weights                                               | batch                    |
|--------|-------------------------------------------------------|--------------------------|
| none   | one process                                           |                          |
| ddp    | a copy in every process                               | a part for every process |
| fsdp   | shards over all processes, gathered block by block    | a part for every process |
| hsdp   | shards within a group, copies between groups          | a part for every process |
| tp     | heads, FFN columns, vocabulary split within a group, shards between groups | a part for every group |

Beside the mode, experts may be divided among processes (`experts`) and blocks among groups of processes
(`pipeline`), within each of which the mode spreads what the group has.

Sharding goes by block: attention, FFN and links of a block are gathered together and freed together. The last norms
and the head stay gathered with the root for the whole pass. Streams keep their dtype between blocks; what is computed
in a lower one is autocast's. Blocks are compiled before they are sharded: the hooks that gather weights run outside.
"""

from __future__ import annotations

import contextlib
import os
import warnings
from collections.abc import Iterator
from shutil import which
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from siamesenorm.errors import ConfigError
from siamesenorm.models.stack import Block, Stack
from siamesenorm.train.distributed import Meshes, World
from siamesenorm.train.parallel.experts import check_experts_of, divide_experts, experts_of, share_statistics, stacked
from siamesenorm.train.parallel.pipeline import Division

if TYPE_CHECKING:
    from siamesenorm.train.parallel.tensor import TensorParallel

LOWEST_TORCH = (2, 12)
"""For several processes, as pyproject.toml has it; 2.8 doubled the gradients of FSDP on gloo without a word."""
WORTH_COMPILING = 2000
"""Steps on a CPU; a step of a small model is 2 to 12 % shorter when compiled (benchmarks/lm.py)."""


def check_torch() -> None:
    """Refuse versions of torch that several processes were never right on, however they came to be installed."""
    if tuple(int(part) for part in torch.__version__.split(".")[:2]) < LOWEST_TORCH:
        lowest = ".".join(map(str, LOWEST_TORCH))
        raise ConfigError(f"torch: {torch.__version__} is not allowed; several processes take {lowest} or newer")


def apply_parallelism(
    model: nn.Module,
    world: World,
    *,
    dtype: torch.dtype | None = None,
    seed: int | None = None,
    compiled: bool = False,
    schedule: str = "1f1b",
    stages: int = 1,
    sequence_parallel: bool | None = None,
    loss_parallel: bool | None = None,
) -> nn.Module:
    """The model, spread over the world; parameters are on its device already or will be moved there.

    dtype: what sharded blocks are gathered and computed in (gradients are summed in float32); default: that of the
    weights. compiled: whether blocks go through torch.compile. schedule, stages: of a `pipeline`. sequence_parallel,
    loss_parallel: of ``tp``, see `tensor`. The optimiser is made afterwards.
    A model of ours on ``meta`` gets the first weights of `seed` here, part by part: every part is spread before the
    next is made, so that no process ever holds more than its own share and one block.
    """
    if world.size == 1 or world.mode == "none":
        if compiled:
            compile_model(model)
        return model.to(world.device)
    check_torch()
    prepare_experts(model, world)
    if world.mode == "ddp" and world.pp == 1:
        model = model.to(world.device)
        if compiled:
            compile_model(model)
        devices = [world.device.index] if world.device.type == "cuda" else None
        return DistributedDataParallel(model, device_ids=devices, gradient_as_bucket_view=True)
    division = Division(model, world, schedule, stages) if world.pp > 1 else None
    options = (division, sequence_parallel, loss_parallel)
    spreading = Spreading(model, world.meshes, world.device, dtype, compiled, *options)
    if isinstance(model, Stack) and next(model.parameters()).is_meta:
        model.init_weights(seed, part_context=spreading.materialized)
    else:
        around = (getattr(model, name, None) for name in ("embedding", "positions", "residual", "head"))
        for part in (*getattr(model, "blocks", ()), *around):
            if isinstance(part, nn.Module) and (division is None or division.has(part)):
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
        self,
        model: nn.Module,
        meshes: Meshes,
        device: torch.device,
        dtype: torch.dtype | None = None,
        compiled: bool = False,
        division: Division | None = None,
        sequence_parallel: bool | None = None,
        loss_parallel: bool | None = None,
    ) -> None:
        self.model, self.meshes, self.device, self.compiled = model, meshes, device, compiled
        self.division = division
        self.tensors: TensorParallel | None = None
        if meshes.tensors is not None:
            from siamesenorm.train.parallel.tensor import TensorParallel

            self.tensors = TensorParallel(model, meshes.tensors, sequence_parallel, loss_parallel)
            if division is not None:
                division.tokens = self.tensors.tokens
        # A linear layer with a bias returns a view; no topology writes over a sublayer's output.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        policy = MixedPrecisionPolicy(dtype, torch.float32 if dtype else None, cast_forward_inputs=False)
        self.alone: dict[nn.Module, MixedPrecisionPolicy] = dict.fromkeys(getattr(model, "blocks", ()), policy)
        embedding, head = getattr(model, "embedding", None), getattr(model, "head", None)
        if isinstance(embedding, nn.Module) and head is not None:
            self.alone[embedding] = MixedPrecisionPolicy(reduce_dtype=policy.reduce_dtype)

    @contextlib.contextmanager
    def materialized(self, part: nn.Module) -> Iterator[None]:
        """Memory for a part, which is filled inside; behind it, what other processes hold is given back."""
        part.to_empty(device="cpu", recurse=part is not self.model)  # where one process draws too
        yield
        if self.division is None or self.division.has(part):
            self.part(part)
        else:
            part.to("meta")

    def part(self, part: nn.Module) -> None:
        """Blocks and embedding by themselves; the rest is split over tensor groups, and waits for `finish`."""
        meshes = self.meshes
        if self.tensors is not None and part is not self.model:
            self.tensors.part(self.moved(part))
        exchanging = list(experts_of(part)) if isinstance(part, Block) and meshes.experts is not None else []
        for moe in exchanging:
            divide_experts(moe.to(self.device), meshes.experts)  # type: ignore[arg-type]
        if self.compiled and isinstance(part, Block):
            if exchanging:  # how many rows travel is known when they do
                part.feed = torch.compiler.disable(part.feed)  # type: ignore[method-assign]
            part.compile(fullgraph=not exchanging)
        if meshes.shards is not None and part in self.alone:
            divided = {parameter for moe in exchanging for parameter in stacked(moe).values()}
            fully_shard(part, mesh=meshes.shards, mp_policy=self.alone[part], ignored_params=divided)
            for moe in exchanging if meshes.expert_shards is not None else ():
                others = set(moe.parameters()) - divided
                fully_shard(moe, mesh=meshes.expert_shards, mp_policy=self.alone[part], ignored_params=others)

    def moved(self, part: nn.Module) -> nn.Module:
        """A part on the device; left alone where it is there, since tensors without values cannot be moved."""
        there = all(tensor.device == self.device for tensor in (*part.parameters(), *part.buffers()))
        return part if there else part.to(self.device)

    def finish(self) -> nn.Module:
        """What is left of the model, or of each stage of a pipeline."""
        if self.division is not None:
            return self.division.finish(self.rest)
        return self.rest(self.model)

    def rest(self, part: nn.Module) -> nn.Module:
        """All of a part that is not spread yet."""
        if self.meshes.shards is None:
            return self.moved(part)
        experts = (stacked(moe).values() for moe in experts_of(part))
        divided: set[nn.Parameter] = {p for found in experts for p in found if isinstance(p, DTensor)}
        fully_shard(part, mesh=self.meshes.shards, ignored_params=divided)
        return part


def prepare_experts(model: nn.Module, world: World) -> None:
    """What mixtures of experts have to know of the world; raises where it cannot divide them."""
    if world.ep > 1:
        check_experts_of(model, world.ep)
    for moe in experts_of(model) if world.data_size > 1 else ():
        share_statistics(moe, world.meshes.data)
