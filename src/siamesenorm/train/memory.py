"""Whether a run fits into the machine's memory, or into what limits leave of it, asked before anything is made."""

from __future__ import annotations

import os
import sys
from pathlib import Path
from typing import NamedTuple

import torch

from siamesenorm.errors import ConfigError
from siamesenorm.tasks import Task
from siamesenorm.train.config import RunConfig
from siamesenorm.train.distributed import World
from siamesenorm.train.parameters import share_of
from siamesenorm.train.planning.hardware import gib
from siamesenorm.train.planning.layouts import layout_of
from siamesenorm.train.planning.needs import need_of
from siamesenorm.train.planning.profile import UncountableError

FLOAT = 4
TRAINED = {"adamw": 4, "muon": 3}
"""Weights, gradients, AdamW's two moments or Muon's one."""
AMPLE = 64
"""A run that has so many times the least it can need is not looked at more closely."""
ANYWAY = "train.memory_check=false begins all the same"


class Least(NamedTuple):
    """Bytes that all processes of a machine need at least, or about."""

    state: float
    batch: float


def check_memory(config: RunConfig, task: Task, world: World) -> None:
    """Raise if weights and optimiser, or a step with them, would not fit; `siamesenorm.train.planning` counts."""
    room = free_memory(world.device, sharing(world)) if config.train.memory_check else None
    if room is None:
        return
    least = least_memory(config, task, world)
    if least.state > room.size:
        raise ConfigError(
            f"model: {task.parameters:,} parameters are not allowed here; with gradients and optimiser they need "
            f"{gib(least.state)}, and {room}; {ANYWAY}"
        )
    if AMPLE * (least.state + least.batch) < room.size:
        return
    need = memory_need(config, task, world)
    if need.state + need.batch > room.size:
        rows = layout_of(config, world).micro_batch
        raise ConfigError.refused(
            "train.batch_size",
            config.train.batch_size,
            f"a micro-batch of {rows} needs {gib(need.batch)} beside the model's {gib(need.state)}, and {room}; lower "
            f"train.micro_batch_size, or set train.activation_checkpointing=full; {ANYWAY}",
            "here",
        )


def memory_need(config: RunConfig, task: Task, world: World, micro: int | None = None) -> Least:
    """What all processes of a machine need, counted on a step without values; at least, where that is not possible.

    micro: samples that one computes at a time; default: as the configuration has it, 1 where it chooses by this.
    The state is what is there when a step is at its fullest: weights and optimiser, and gradients that wait there.
    """
    try:
        need = need_of(config, layout_of(config, world, micro), "cuda" if world.device.type == "cuda" else "cpu")
    except UncountableError:
        recomputed = config.train.activation_checkpointing != "none"
        return least_memory(config, task, world, micro, recomputed=recomputed)
    here = sharing(world)
    state = min(need.state, need.peak)
    return Least(here * state, here * (need.peak - state))


def least_memory(
    config: RunConfig, task: Task, world: World, micro: int | None = None, *, recomputed: bool = True
) -> Least:
    """A lower bound for the processes that share the memory, without making anything.

    micro: samples that one computes at a time; default: as the configuration has it, 1 where it chooses by this.
    recomputed: whether nothing inside of sublayers is counted, which takes no time.
    """
    beside = TRAINED[config.optimizer.kind] - 1 + (config.train.ema is not None)
    copies = 1 + beside * share_of(config, task.model_of)
    shards = world.size if world.mode in ("fsdp", "tp") else world.group * world.pp
    here = sharing(world)
    samples = config.train.batch_size / world.data_size
    at_once = min(samples, layout_of(config, world, micro).micro_batch)
    activations = task.least_activations(recomputed)
    width = FLOAT if config.train.precision == "fp32" else 2
    batch = at_once * activations * width + samples * task.units_per_sample * 16
    return Least(here * copies * FLOAT * task.parameters / shards, here * batch)


def sharing(world: World) -> int:
    """Processes that share the memory."""
    return world.local_size if world.device.type == "cpu" else 1


class Room(NamedTuple):
    """Bytes available, at most, to all processes that share them, and who says so."""

    size: float
    words: str

    def __str__(self) -> str:
        return self.words.format(gib(self.size))


def free_memory(device: torch.device, processes: int = 1) -> Room | None:
    """Available memory; None where the system does not say."""
    if device.type == "cuda":
        return Room(float(torch.cuda.mem_get_info(device)[0]), "this GPU has {} free")
    rooms = [machine_room(), group_room(), process_room(processes)]
    return min((room for room in rooms if room is not None), default=None)


def machine_room() -> Room | None:
    """What the whole machine has."""
    available = [line.split()[1] for line in _lines(Path("/proc/meminfo")) if line.startswith("MemAvailable:")]
    if available:
        return Room(float(available[0]) * 1024, "this machine has {} free")
    try:
        return Room(float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")), "this machine has {} free")
    except (AttributeError, OSError, ValueError):
        return None


def process_room(processes: int = 1) -> Room | None:
    """What ``ulimit -v`` leaves to processes of this one's size."""
    if sys.platform == "win32":
        return None
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit == resource.RLIM_INFINITY:
        return None
    pages = "".join(_lines(Path("/proc/self/statm"))).split()
    used = int(pages[0]) * resource.getpagesize() if pages else 0
    return Room(max(0.0, float(limit - used)) * processes, "ulimit -v leaves {}")


def group_room(root: Path = Path("/")) -> Room | None:
    """What the control groups that this process is in leave of their limits, version 1 or 2; page cache counts as free.

    root: where proc and sys are mounted.
    """
    rooms = []
    for line in _lines(root / "proc/self/cgroup"):
        _, _, rest = line.partition(":")
        controllers, _, path = rest.partition(":")
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        names = V1 if controllers else V2
        parts = [part for part in path.split("/") if part not in ("", "..")]
        folders = [top.joinpath(*parts[:count]) for count in range(len(parts) + 1)]  # a limit above counts as well
        rooms += [room for room in map(names.room, folders) if room is not None]
    return min(rooms, default=None)


class GroupFiles(NamedTuple):
    """How a version of control groups names its files."""

    limit: str
    used: str
    cache: tuple[str, str]

    def room(self, folder: Path) -> Room | None:
        """What one group leaves; None where it has no limit."""
        try:
            limit, used = (int("".join(_lines(folder / name))) for name in (self.limit, self.used))
        except ValueError:  # not there, or "max"
            return None
        fields = dict(line.split()[:2] for line in _lines(folder / "memory.stat") if len(line.split()) == 2)
        cache = sum(int(fields.get(name, 0)) for name in self.cache)
        return Room(max(0.0, float(limit - used + cache)), "this control group has {} free")


V1 = GroupFiles("memory.limit_in_bytes", "memory.usage_in_bytes", ("total_active_file", "total_inactive_file"))
V2 = GroupFiles("memory.max", "memory.current", ("active_file", "inactive_file"))


def _lines(path: Path) -> list[str]:
    """A system file's lines, none where it is not there."""
    try:
        return path.read_text(encoding="ascii", errors="replace").splitlines()
    except OSError:
        return []
