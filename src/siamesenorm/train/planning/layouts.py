"""Layouts: how a run is laid out over GPUs, and which of them are tried.

A dimension of a layout is a field of `Layout`, a row of `DIMENSIONS` (what it changes in one process's model) and a
row of `FIELDS` (what it is called in a run's configuration).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from siamesenorm.errors import ConfigError
from siamesenorm.train.config import RunConfig
from siamesenorm.train.distributed import World
from siamesenorm.train.parallel.pipeline import INTERLEAVED
from siamesenorm.train.parallel.vocabulary import divides_vocabulary

CHECKPOINTING = ("none", "sublayer", "full")
TENSOR_GROUPS = (2, 4, 8)
"""Sizes that are tried; beyond a machine's fast links a tensor group does not pay."""
EXPERT_GROUPS = PIPELINES = (2, 4, 8)
LARGEST_PART = 256
"""Samples of a part that are tried at most."""


@dataclass(frozen=True)
class Layout:
    """One way to spread a run."""

    gpus: int
    mode: str
    """``none``, ``ddp``, ``fsdp``, ``hsdp`` or ``tp``."""
    micro_batch: int
    """Samples that a process computes at a time."""
    checkpointing: str = "none"
    shards: int = 1
    """Processes that share one copy of weights, gradients and optimiser."""
    tensor: int = 1
    """Processes that share heads and FFN columns of every block, tokens between sublayers and the vocabulary."""
    ep: int = 1
    """Processes that divide a block's experts."""
    pp: int = 1
    """Groups of processes that a pipeline has; shards and tensor groups are within one."""
    schedule: str = "1f1b"
    stages: int = 1
    """Of a pipeline, those of one process."""

    @property
    def data(self) -> int:
        """Parts that a batch is divided into, one for each process or tensor group."""
        return self.gpus // self.tensor // self.pp

    @property
    def replicas(self) -> int:
        """Copies of the sharded model."""
        return self.data // self.shards

    def parts(self, batch_size: int) -> int:
        """Parts in which a process computes its share of a batch."""
        return -(-self.share(batch_size) // self.micro_batch)

    def share(self, batch_size: int) -> int:
        """Samples of a batch that a process has, at most."""
        return -(-batch_size // self.data)

    @property
    def name(self) -> str:
        """As people say it: ``hsdp 8``, ``tp 2 × fsdp 16``."""
        if self.mode == "hsdp":
            name = f"hsdp {self.shards}"
        elif self.mode == "tp":
            name = f"tp {self.tensor}" + (f" × fsdp {self.shards}" if self.shards > 1 else "")
        else:
            name = {"none": "one GPU"}.get(self.mode, self.mode)
        if self.pp > 1:
            name = f"pp {self.pp}" + (f" × {name}" if self.gpus > self.pp else "")
        return name + (f", ep {self.ep}" if self.ep > 1 else "")

    def overrides(self, config: RunConfig) -> list[str]:
        """What differs from a run's own configuration, as ``key=value``."""
        wanted = {name: value(self, config) for name, value in FIELDS.items()}
        values = config.as_dict()
        return [f"{name}={value}" for name, value in wanted.items() if value != _value_of(values, name)]


def _value_of(values: dict[str, Any], name: str) -> Any:
    section, _, field = name.partition(".")
    return values[section][field]


FIELDS: dict[str, Callable[[Layout, RunConfig], Any]] = {
    "parallel.mode": lambda layout, config: config.parallel.mode if layout.mode == "none" else layout.mode,
    "parallel.group": lambda layout, config: {"hsdp": layout.shards, "tp": layout.tensor}.get(
        layout.mode, config.parallel.group
    ),
    "parallel.ep": lambda layout, config: layout.ep,
    "parallel.pp": lambda layout, config: layout.pp,
    "train.micro_batch_size": lambda layout, config: (
        None
        if config.train.micro_batch_size is None and layout.parts(config.train.batch_size) == 1
        else layout.micro_batch
    ),
    "train.activation_checkpointing": lambda layout, config: layout.checkpointing,
}
"""Fields of a configuration that a layout decides."""


def narrowed(config: RunConfig, size: int) -> RunConfig:
    """The model that one process of a tensor group has: so many times fewer heads and FFN columns."""
    model: Any = config.model
    kv_heads = getattr(model, "kv_heads", None)
    changes: dict[str, Any] = {"heads": model.heads // size, "ffn_dim": model.ffn_dim // size}
    if kv_heads is not None:
        changes["kv_heads"] = kv_heads // size
    if "head_dim" in type(model).model_fields:
        changes["head_dim"] = model.dim_per_head
    if getattr(model, "moe", None) is not None:  # experts stay whole
        changes.pop("ffn_dim")
    if has_vocabulary_divided(config, size):
        changes["vocab_size"] = -(-model.vocab_size // size)
    return config.model_copy(update={"model": model.model_copy(update=changes)})


def has_vocabulary_divided(config: RunConfig, size: int) -> bool:
    """Whether tensor groups of so many processes divide embedding, head and loss."""
    vocabulary = getattr(config.model, "vocab_size", None)
    return vocabulary is not None and size > 1 and divides_vocabulary(config.parallel.loss_parallel, vocabulary, size)


def fewer_experts(config: RunConfig, size: int) -> RunConfig:
    """The model that one of the processes has that divide experts; no fewer than a token chooses."""
    model: Any = config.model
    few = max(model.moe.experts // size, model.moe.top_k)
    return config.model_copy(
        update={"model": model.model_copy(update={"moe": model.moe.model_copy(update={"experts": few})})}
    )


DIMENSIONS: dict[str, Callable[[RunConfig, int], RunConfig]] = {"tensor": narrowed, "ep": fewer_experts}
"""What a dimension of a layout makes of the model that one process computes."""


def of_process(config: RunConfig, layout: Layout) -> RunConfig:
    """The run as one process of a layout computes it."""
    for name, change in DIMENSIONS.items():
        if (size := getattr(layout, name)) > 1:
            config = change(config, size)
    return config


def world_of(layout: Layout) -> World:
    """The first process of a layout's world; raises where there is none."""
    group = {"hsdp": layout.shards, "tp": layout.tensor}.get(layout.mode)
    return World(0, layout.gpus, 0, layout.gpus, mode=layout.mode, group=group, ep=layout.ep, pp=layout.pp)


def layout_of(config: RunConfig, world: World, micro: int | None = None) -> Layout:
    """The layout that a run has in a world of processes.

    micro: samples at a time; default: as the configuration has it, 1 where that is to be as large as fits.
    """
    shards = {"fsdp": world.stage_size, "hsdp": world.group, "tp": world.data_size}.get(world.mode, 1)
    tensor = world.group if world.mode == "tp" else 1
    wish, share = config.train.micro_batch_size, -(-config.train.batch_size // world.data_size)
    rows = micro or (share if wish is None else 1 if wish == "auto" else min(wish, share))
    checkpointing = config.train.activation_checkpointing
    return Layout(
        world.size, world.mode, rows, checkpointing, shards, tensor, world.ep, world.pp, *stages_of(config, world.pp)
    )


def stages_of(config: RunConfig, pp: int) -> tuple[str, int]:
    """The schedule of a run's pipeline, and the stages of a process."""
    schedule = config.parallel.schedule
    return schedule, config.parallel.stages if pp > 1 and schedule == INTERLEAVED else 1


def given_layout(config: RunConfig, gpus: int, machine: int) -> Layout:
    """The layout that a run has on so many GPUs, `machine` of them in each machine, as its configuration stands."""
    parallel = config.parallel
    how = {name: getattr(parallel, name) for name in ("mode", "group", "ep", "pp")}
    try:
        world = World(0, gpus, 0, min(machine, gpus), **how)
    except ConfigError as error:
        raise ConfigError(f"{error} (GPUs)") from None
    return layout_of(config, world)


def possible_layouts(config: RunConfig, gpus: int, machine: int) -> Iterator[Layout]:
    """All that are tried on so many GPUs, `machine` of them in each machine."""
    for kind in possible_kinds(config, gpus, machine):
        part, processes = 1, gpus // kind.get("tensor", 1) // kind.get("pp", 1)
        while part <= min(LARGEST_PART, -(-config.train.batch_size // processes)):
            for checkpointing in CHECKPOINTING:
                yield Layout(gpus, micro_batch=part, checkpointing=checkpointing, **kind)
            part *= 2


def possible_kinds(config: RunConfig, gpus: int, machine: int) -> Iterator[dict[str, Any]]:
    """The same, whatever the micro-batch and what is computed again."""
    pipelines = [size for size in PIPELINES if gpus % size == 0] if has_vocabulary(config) else []
    for pp in (1, *pipelines):
        size = gpus // pp
        kinds: list[dict[str, Any]] = [{"mode": "none" if gpus == 1 else "ddp"}] if pp == 1 or size == 1 else []
        if size > 1:
            kinds.append({"mode": "fsdp", "shards": size})
        groups = sorted({machine, 2 * machine}) if pp == 1 else [machine]
        kinds += [{"mode": "hsdp", "shards": group} for group in groups if group < size and size % group == 0]
        for tensor in TENSOR_GROUPS:
            if tensor <= machine and size % tensor == 0:
                kinds.append({"mode": "tp", "tensor": tensor, "shards": size // tensor})
        if getattr(config.model, "moe", None) is not None:
            kinds += [{**kind, "ep": ep} for kind in kinds for ep in EXPERT_GROUPS if ep <= kind.get("shards", 1)]
        schedule, stages = stages_of(config, pp)
        yield from ({**kind, "pp": pp, "schedule": schedule, "stages": stages} for kind in kinds)


def has_vocabulary(config: RunConfig) -> bool:
    """Whether a run's model is a language model, which a pipeline takes."""
    return hasattr(config.model, "vocab_size")
