"""The processes of a run: who this one is, where it computes, and the few words they say to each other.

``World.start()`` reads what torchrun (or SLURM's srun around it) has put into the environment; without it the world
is one process and nothing is initialised. Gloo carries tensors on the CPU, NCCL those on GPUs.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from siamesenorm.errors import ConfigError
from siamesenorm.train.torchrun import ProcessPlace, meet, of_process, refuse, watch_agent

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

    from siamesenorm.tasks.base import Ranks
    from siamesenorm.train.config import ParallelConfig

Value = TypeVar("Value")
TIMEOUT = 600.0
CHANNEL_TIMEOUT = 7200.0
_failed: list[Any] = []
GROUPED = ("hsdp", "tp")
"""Modes that have groups of processes."""


class World:
    """All processes of a run, seen from one of them.

    rank, size: this process and how many there are. local_rank, local_size: the same on its machine.
    device: where it computes. mode: how the model is spread (``none``, ``ddp``, ``fsdp``, ``hsdp`` or ``tp``).
    group: processes that share one copy of the model's weights in ``hsdp`` and one batch in ``tp``.
    ep: processes among which a block's experts are divided. pp: stages of a pipeline, each a group of processes.
    """

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        local_rank: int = 0,
        local_size: int = 1,
        device: torch.device | None = None,
        mode: str = "none",
        group: int | None = None,
        timeout: float = TIMEOUT,
        ep: int = 1,
        pp: int = 1,
    ) -> None:
        self.rank, self.size, self.local_rank, self.local_size = rank, size, local_rank, local_size
        self.device = device or torch.device("cpu")
        self.mode = mode if size > 1 else "none"
        if size % pp:
            raise ConfigError.refused("parallel.pp", pp, f"with {size} processes it takes {divisors(size)}")
        self.ep, self.pp, self.stage_size = ep, pp, size // pp
        self.group = check_group(self.mode, self.stage_size, min(local_size, self.stage_size), group)
        self.timeout = timedelta(seconds=timeout)
        check_experts(self)
        if pp > 1 and self.mode == "ddp" and self.stage_size > 1:
            raise ConfigError.not_allowed(
                "parallel.mode", "ddp", "fsdp, hsdp or tp", when=f"with parallel.pp = {pp} on {size} processes"
            )
        self._meshes: Meshes | None = None

    @classmethod
    def start(
        cls, parallel: ParallelConfig | None = None, device: Callable[[ProcessPlace], torch.device] | None = None
    ) -> World:
        """Join the world that the environment describes; every process of it must call this, or `refuse`.

        device: chooses where this process computes; default: as `parallel` says.
        """
        watch_agent()
        place = ProcessPlace.from_environment()
        mode, group = (parallel.mode, parallel.group) if parallel else ("ddp", None)
        ep, pp, timeout = (parallel.ep, parallel.pp, parallel.timeout) if parallel else (1, 1, TIMEOUT)
        try:
            chosen = (
                choose_device(parallel.device if parallel else "auto", place.local_rank)
                if device is None
                else device(place)
            )
            places = (place.rank, place.size, place.local_rank, place.local_size)
            world = cls(*places, chosen, mode, group, timeout, ep, pp)
        except ValueError as error:
            refuse(str(error))
            raise
        if world.size > 1:
            if chosen.type == "cuda":
                torch.cuda.set_device(chosen)
            backend = "cpu:gloo,cuda:nccl" if chosen.type == "cuda" else "gloo"
            store = meet(place, min(world.timeout, timedelta(seconds=TIMEOUT)))
            dist.init_process_group(backend, store=store, rank=world.rank, world_size=world.size, timeout=world.timeout)
        return world

    def close(self) -> None:
        """Leave the world."""
        if self.size > 1 and dist.is_initialized():
            if sys.exc_info()[1] is not None:
                # DDP's reducer may live on in the trace. Were it the last to let go of the group, it would wait with
                # Python's lock held for the group's threads, and these may be waiting for the lock.
                _failed.append(dist.group.WORLD)
            dist.destroy_process_group()

    @property
    def is_main(self) -> bool:
        """Whether this process speaks for all: it alone writes logs and shows progress."""
        return self.rank == 0

    @property
    def divides_weights(self) -> bool:
        """Whether a process holds a part of the model only."""
        return self.pp > 1 or self.mode in ("fsdp", *GROUPED)

    @property
    def stage(self) -> int:
        """Which group of a pipeline this process is in."""
        return self.rank // self.stage_size

    @property
    def data_rank(self) -> int:
        """Which part of a batch this process computes; the processes of one tensor group compute the same part."""
        place = self.rank % self.stage_size
        return place // self.group if self.mode == "tp" else place

    @property
    def data_size(self) -> int:
        """Into how many parts a batch is divided."""
        return self.stage_size // self.group if self.mode == "tp" else self.stage_size

    @property
    def tensor_size(self) -> int:
        """Processes of a tensor group."""
        return self.group if self.mode == "tp" else 1

    @property
    def tensor_rank(self) -> int:
        """Which of them this process is."""
        return self.rank % self.tensor_size

    @property
    def copies(self) -> int:
        """How many times sharded weights are there as a whole: once in each sharding group of ``hsdp``."""
        return self.stage_size // self.group if self.mode == "hsdp" else 1

    @property
    def meshes(self) -> Meshes:
        """The processes as one mesh, and its parts."""
        if self._meshes is None:
            self._meshes = Meshes.of(self)
        return self._meshes

    def barrier(self) -> None:
        """Wait for all."""
        if self.size > 1:
            dist.all_reduce(torch.zeros(1))

    def mean(self, values: dict[str, float]) -> dict[str, float]:
        """Means of named numbers over all processes; the names must be the same everywhere."""
        if self.size == 1:
            return dict(values)
        means = self.mean_of(torch.tensor(list(values.values()), dtype=torch.float64))
        return dict(zip(values, means.tolist(), strict=True))

    def mean_of(self, values: torch.Tensor) -> torch.Tensor:
        """The same of a tensor, on its own device, which is not waited for; in float64."""
        sums = values.to(torch.float64, copy=True)
        if self.size > 1:
            dist.all_reduce(sums)
        return sums / self.size

    def any(self, flag: bool) -> bool:
        """Whether the flag is set in any process."""
        if self.size == 1:
            return flag
        flags = torch.tensor(float(flag))
        dist.all_reduce(flags, op=dist.ReduceOp.MAX)
        return bool(flags.item())

    def gather(self, value: Value, group: dist.ProcessGroup | None = None) -> list[Value]:
        """One small value of every process, in order of rank, to all of them."""
        if self.size == 1:
            return [value]
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=group)
        return values

    def gather_data(self, value: Value) -> list[Value]:
        """One small value of every part of a batch, in order; processes that compute the same part have the same."""
        found = dict(reversed(self.gather((self.data_rank, value))))
        return [found[rank] for rank in range(self.data_size)]

    def ranks(self, final: bool) -> Ranks:
        """These processes as evaluation sees them; final: after the last step."""
        from siamesenorm.tasks.base import Ranks

        return Ranks(self.data_rank, self.data_size, self.mean, final, self.gather_data)

    def from_main(self, value: Value, group: dist.ProcessGroup | None = None) -> Value:
        """The main process's value, to all."""
        if self.size == 1:
            return value
        values: list[Any] = [value]
        dist.broadcast_object_list(values, src=0, group=group, device=torch.device("cpu"))
        return values[0]

    def agree(self, action: Callable[[], Value]) -> Value:
        """What an action gives in this process; if it fails in any process, it fails in all of them.

        The action itself must not wait for other processes.
        """
        if self.size == 1:
            return action()
        failure: Exception | None = None
        try:
            result = action()
        except Exception as error:
            failure = error
        problems = self.gather(None if failure is None else sentence_of(failure))
        if failure is not None:
            raise failure
        for rank, problem in enumerate(problems):
            if problem is not None:
                raise ConfigError(of_process(rank, problem))
        return result

    def agree_with_main(self, action: Callable[[], object]) -> None:
        """The same for what the main process alone does."""
        self.agree(action if self.is_main else lambda: None)

    def new_group(self) -> dist.ProcessGroup | None:
        """A second channel on the CPU, for a thread that talks while the first one is in use.

        It waits longer: what the thread does (writing to a slow disk) may take its time. A process that dies is
        noticed at once all the same, by its broken connections.
        """
        if self.size == 1:
            return None
        return dist.new_group(backend="gloo", timeout=max(self.timeout, timedelta(seconds=CHANNEL_TIMEOUT)))


@dataclass(frozen=True)
class Meshes:
    """Parts of one mesh of all processes, whose dimensions are pp, replicate, shard and tensor.

    For experts, ``shard`` is unfolded into (shard_experts, ep).
    """

    data: DeviceMesh
    """All processes that compute parts of one batch, in one dimension."""
    shards: DeviceMesh | None
    """What weights are sharded over, (replicate, shard) in ``hsdp``; None: nothing."""
    expert_shards: DeviceMesh | None = None
    """The same of experts, which are divided over `experts` before."""
    experts: DeviceMesh | None = None
    tensors: DeviceMesh | None = None
    stages: DeviceMesh | None = None

    @classmethod
    def of(cls, world: World) -> Meshes:
        """The meshes of a world; every process must call this."""
        from torch.distributed.device_mesh import init_device_mesh

        tensor, copies = world.tensor_size, world.copies
        shard = world.data_size // copies
        sizes = {"pp": world.pp, "replicate": copies, "shard": shard, "tensor": tensor}
        sizes = {name: size for name, size in sizes.items() if size > 1 or name == "shard"}
        mesh = init_device_mesh(world.device.type, tuple(sizes.values()), mesh_dim_names=tuple(sizes))
        stage = tuple(name for name in sizes if name != "pp")
        if len(stage) > 1:
            mesh[stage]._flatten("all")  # lets norms over several dimensions be one reduction
        dense = tuple(name for name in stage if name != "tensor")
        data = mesh[dense]._flatten("data") if len(dense) > 1 else mesh["shard"]
        shards = mesh[dense] if world.data_size > 1 and world.divides_weights else None
        expert_shards, experts = shards, None
        if world.ep > 1:
            fine = mesh._unflatten("shard", (shard // world.ep, world.ep), ("shard_experts", "ep"))
            names = ("replicate", "shard_experts") if copies > 1 else ("shard_experts",)
            expert_shards, experts = fine[names] if copies * shard > world.ep else None, fine["ep"]
        parts = (mesh[name] if name in sizes else None for name in ("tensor", "pp"))
        return cls(data, shards, expert_shards, experts, *parts)


def sentence_of(error: Exception) -> str:
    """The message that other processes get of an error in this one."""
    if isinstance(error, ValueError):
        return str(error)
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename else error.strerror
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}".rstrip(": ")


def lost_another(error: Exception) -> bool:
    """Whether an error is that another process cannot be talked to any more."""
    words = r"gloo|NCCL|[Cc]onnection (closed|reset|refused)|Broken pipe|pair closure|Timed out waiting"
    return isinstance(error, dist.DistError) or (isinstance(error, RuntimeError) and bool(re.search(words, str(error))))


def choose_device(wish: str, local_rank: int) -> torch.device:
    """The device for a process: ``auto`` takes a GPU where there are any."""
    if wish == "cpu" or (wish == "auto" and not torch.cuda.is_available()):
        return torch.device("cpu")
    if not torch.cuda.is_available():
        raise ConfigError.refused("parallel.device", "cuda", "this machine has no GPU that PyTorch can use")
    if local_rank >= torch.cuda.device_count():
        raise ConfigError(
            f"parallel.device: process {local_rank} of this machine has no GPU of its own; "
            f"start at most {torch.cuda.device_count()} (torchrun --nproc-per-node)"
        )
    return torch.device("cuda", local_rank)


def check_group(mode: str, size: int, local_size: int, group: int | None) -> int:
    """Processes in a sharding or tensor group; a machine's by default."""
    if mode not in GROUPED:
        return size if mode == "fsdp" else 1
    group = group or local_size
    if size % group:
        raise ConfigError.refused("parallel.group", group, f"with {size} processes it takes {divisors(size)}")
    return group


def divisors(size: int) -> str:
    """All divisors of a number, in words."""
    return ", ".join(str(number) for number in range(1, size + 1) if size % number == 0)


def check_experts(world: World) -> None:
    """Raise where experts cannot be divided among so many processes."""
    if world.ep == 1:
        return
    if world.size > 1 and world.mode not in ("fsdp", *GROUPED):
        raise ConfigError.not_allowed("parallel.ep", world.ep, "fsdp, hsdp or tp", when=f"with {world.mode}")
    over = world.data_size // world.copies
    if over % world.ep:
        raise ConfigError.refused(
            "parallel.ep", world.ep, f"with {over} processes that share the weights it takes {divisors(over)}"
        )
