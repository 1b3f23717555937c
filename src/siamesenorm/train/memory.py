"""Whether a run fits into the machine's memory, asked before anything is made."""

from __future__ import annotations

import os
from typing import NamedTuple

import torch

from siamesenorm.tasks import Task
from siamesenorm.train.config import RunConfig
from siamesenorm.train.distributed import World
from siamesenorm.train.errors import ConfigError

FLOAT = 4
TRAINED = 4  # weights, gradients, AdamW's two moments


class Need(NamedTuple):
    """Bytes at least."""

    state: float
    batch: float


def check_memory(config: RunConfig, task: Task, world: World) -> None:
    """Raise if weights and optimiser, or one step's batch, cannot fit."""
    free = free_memory(world.device)
    if free is None:
        return
    need = least_memory(config, task, world)
    machine = "this GPU" if world.device.type == "cuda" else "this machine"
    if need.state > free:
        raise ConfigError(
            f"model: {task.parameters:,} parameters are not allowed here; with gradients and optimiser they need "
            f"{gib(need.state)}, and {machine} has {gib(free)} free"
        )
    if need.state + need.batch > free:
        raise ConfigError(
            f"train.batch_size: {config.train.batch_size} is not allowed here; one part of the batch needs "
            f"{gib(need.batch)} beside the model's {gib(need.state)}, and {machine} has {gib(free)} free; "
            f"raise train.accumulation, or lower batch_size or sequence_length"
        )


def least_memory(config: RunConfig, task: Task, world: World) -> Need:
    """A lower bound for one process."""
    copies = TRAINED + (config.train.ema is not None)
    shards = world.size if world.mode in ("fsdp", "tp") else world.group if world.mode == "hsdp" else 1
    here = world.local_size if world.device.type == "cpu" else 1  # processes that share the memory
    samples = config.train.batch_size / world.data_size
    activations = task.least_activations(config.train.activation_checkpointing != "none")
    batch = samples / config.train.accumulation * activations * FLOAT + samples * task.units_per_sample * 16
    return Need(here * copies * FLOAT * task.parameters / shards, here * batch)


def free_memory(device: torch.device) -> float | None:
    """Bytes that can be had, None where the system does not say."""
    if device.type == "cuda":
        return float(torch.cuda.mem_get_info(device)[0])
    try:
        with open("/proc/meminfo", encoding="ascii") as file:
            for line in file:
                if line.startswith("MemAvailable:"):
                    return float(line.split()[1]) * 1024
    except OSError:
        pass
    try:
        return float(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"))
    except (AttributeError, OSError, ValueError):
        return None


def gib(size: float) -> str:
    """Bytes in GiB."""
    return f"{size / 2**30:,.1f} GiB"
