"""Bytes that a step sends and the time it would take on a GPU, by data sheets and stated assumptions."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

from siamesenorm.train.config import RunConfig
from siamesenorm.train.parallel.sequence import divides_tokens
from siamesenorm.train.planning.hardware import GPU, Assumptions
from siamesenorm.train.planning.layouts import Layout, has_vocabulary_divided
from siamesenorm.train.planning.needs import FLOAT, Parts, of_places, own_parts, tensor_sums
from siamesenorm.train.planning.stages import (
    AtDepth,
    PlannedStage,
    arriving,
    gatherings,
    leaving,
    passes,
    places_of_group,
)

UPDATE = {"adamw": 7, "muon": 6}
"""How often an optimiser's step reads or writes a number of the size of the weights."""
NEWTON_SCHULZ = 20
"""Products of Muon's five iterations, each of rows × rows × columns, two operations a term; about."""


@dataclass(frozen=True)
class Sent:
    """Bytes that one process sends in a step, by collective; in rings, as NCCL and gloo do for large tensors."""

    all_gather: float = 0.0
    reduce_scatter: float = 0.0
    all_reduce: float = 0.0
    """Of gradients."""
    tensor: float = 0.0
    """Of activations, in tensor groups."""
    tensor_scattered: float = 0.0
    """Of these, in sums that are scattered."""
    all_to_all: float = 0.0
    """Of tokens, to experts and back."""
    pipeline: float = 0.0
    """Of streams and their gradients, to the stages before and behind."""
    collectives: int = 0

    @property
    def all(self) -> float:
        """Bytes."""
        tokens = self.tensor + self.all_to_all + self.pipeline
        return self.all_gather + self.reduce_scatter + self.all_reduce + tokens


def sent_by(config: RunConfig, layout: Layout) -> Sent:
    """What a process of a layout sends in a step; in a pipeline, one of the group that sends most."""
    if layout.pp == 1:
        blocks = int(getattr(config.model, "blocks", 1))
        return sent_in(
            config, layout, own_parts(config, layout)[0], blocks, 2, 2 * layout.parts(config.train.batch_size)
        )
    return max((sent_by_group(config, layout, group) for group in range(layout.pp)), key=lambda sent: sent.all)


def sent_by_group(config: RunConfig, layout: Layout, group: int) -> Sent:
    """What a process of one of a pipeline's groups sends: streams to the next stage and gradients back, among it."""
    places, count = places_of_group(config, layout, group), layout.parts(config.train.batch_size)
    parts = of_places(own_parts(config, layout)[0], places, config)
    blocks, ends = sum(len(place.blocks) for place in places), sum(place.first + place.last for place in places)
    gathered = gatherings(list(passes(layout, count, group)), len(places))
    sent = sent_in(config, layout, parts, blocks, ends, sum(gathered) / len(gathered))
    travelled = sum(leaving(config, layout, place) + arriving(config, layout, place) for place in places)
    return replace(sent, pipeline=count * travelled, collectives=sent.collectives + 2 * count * len(places))


def sent_in(config: RunConfig, layout: Layout, parts: Parts, blocks: int, ends: int, gathered_times: float) -> Sent:
    """What a process sends that has so many blocks, and so many of the two ends of a model.

    parts: of the model that it has itself. gathered_times: how often sharded blocks are gathered in a step.
    """
    times = layout.parts(config.train.batch_size)
    gradients = FLOAT * parts.trained
    gathered = scattered = reduced = tensor = summed = 0.0
    count = 0
    if layout.shards > 1:
        share, few = (layout.shards - 1) / layout.shards, layout.shards / layout.ep
        width = 2 if config.train.precision == "bf16" else FLOAT
        experts = (few - 1) / few * parts.experts  # a process's own, which fewer processes shard
        # Blocks and embedding on the way there and back, the root once a part, or once a step in a pipeline.
        blocks_sent = share * (parts.blocks - parts.experts) + experts
        root = parts.root * (times if layout.pp == 1 else 1)
        gathered = gathered_times * width * blocks_sent + share * FLOAT * (gathered_times * parts.embedding + root)
        scattered = share * (gradients - FLOAT * parts.experts) + FLOAT * experts
        count += round(blocks * gathered_times) + 3 * times + blocks + 2
    if layout.replicas > 1:
        held = (gradients - FLOAT * parts.experts) / layout.shards + FLOAT * parts.experts * layout.ep / layout.shards
        reduced = 2 * (layout.replicas - 1) / layout.replicas * held
        count += blocks + 2
    if layout.tensor > 1:
        block, outside = tensor_passes(config, layout)
        share, whole = (layout.tensor - 1) / layout.tensor, tensor_sums(layout, config)
        width = FLOAT if config.train.precision == "fp32" else 2
        tensor = times * share * whole * (blocks * block.all + ends / 2 * outside.all * FLOAT / width)
        summed = times * share * whole * (blocks * block.scattered + ends / 2 * outside.scattered * FLOAT / width)
        if divides_tokens(config, layout.tensor):  # of the links' gradients, every process has a part
            tensor += 2 * share * FLOAT * parts.links * (times if layout.shards == 1 else 1)
        count += times * 4 * blocks
    travelled = exchanged(config, layout, times * blocks)
    count += (4 * times * blocks) * (layout.ep > 1)
    return Sent(gathered, scattered, reduced, tensor, summed, travelled, collectives=count)


def exchanged(config: RunConfig, layout: Layout, times: int) -> float:
    """Bytes of tokens that leave a process for experts and come back, there and on the way back; balanced routing."""
    if layout.ep == 1:
        return 0.0
    model: Any = config.model
    rows = layout.micro_batch * config.sample_tokens * model.moe.top_k
    width = FLOAT if config.train.precision == "fp32" else 2
    return times * 4 * (layout.ep - 1) / layout.ep * rows * model.dim * width


class Passes(NamedTuple):
    """How often activations of all tokens are gathered or scattered; a sum counts twice."""

    all: int
    scattered: int
    """Of these, sums that are scattered."""


def tensor_passes(config: RunConfig, layout: Layout) -> tuple[Passes, Passes]:
    """In a block, and around the blocks.

    There and back, a sublayer's input and its output, each a sum or a gathering and a scattering; experts are not
    split.
    """
    tokens, loss = divides_tokens(config, layout.tensor), has_vocabulary_divided(config, layout.tensor)
    experts = getattr(config.model, "moe", None) is not None
    block = Passes(4 + 2 * tokens, 2 * tokens) if experts else Passes(8, 4 * tokens)
    # The embedding's sum and the head's gradient; with divided tokens, the embedding's gradient and the head's input.
    return block, Passes((2 - tokens) * loss + 2 * loss + 2 * tokens, tokens * loss)


@dataclass(frozen=True)
class StageWork:
    """What one GPU computes in a step; in a pipeline, one of the slowest group."""

    flops: float
    """Of the mean GPU."""
    slowest: float
    traffic: float
    trained: float
    """Parameters whose update it computes, and of these, `blocks`' (of whole matrices, for Muon)."""
    blocks: float
    bubble: float = 0.0
    """How long a group of a pipeline waits for others, in shares of the time that it computes."""


def work_of(config: RunConfig, layout: Layout, at: AtDepth) -> StageWork:
    """What a step computes. at: profiles of one part of a process's batch, by number of blocks."""
    times, parts = layout.parts(config.train.batch_size), own_parts(config, layout)[0]
    found = at(int(getattr(config.model, "blocks", 0)))
    flops = times * found.flops / layout.pp
    if layout.pp == 1:
        return StageWork(flops, flops, times * found.traffic, parts.trained / layout.shards, parts.blocks)
    groups = []
    for group in range(layout.pp):
        places = places_of_group(config, layout, group)
        stages, own = [PlannedStage.of(place, at) for place in places], of_places(parts, places, config)
        slowest, traffic = (times * sum(getattr(stage, name) for stage in stages) for name in ("flops", "traffic"))
        groups.append(StageWork(flops, slowest, traffic, own.trained / layout.shards, own.blocks))
    bubble = (layout.pp - 1) / (times * layout.stages)
    return replace(max(groups, key=lambda work: work.slowest), bubble=bubble)


@dataclass(frozen=True)
class StepTime:
    """Seconds of a step, by what they go to."""

    matmul: float
    memory: float
    optimizer: float
    bubble: float
    """In which a group of a pipeline waits for others."""
    exposed: float
    """Sending that nothing is computed beside."""
    network: float
    """All sending."""

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.matmul + self.memory + self.optimizer + self.bubble + self.exposed


def step_time(
    config: RunConfig, layout: Layout, work: StageWork, sent: Sent, gpu: GPU, assumed: Assumptions
) -> StepTime:
    """An estimate."""
    peak = gpu.flops if config.train.precision != "fp32" else gpu.flops_fp32 if config.train.tf32 else gpu.flops / 16
    matmul = work.slowest / (peak * assumed.matmul)
    left = 1.0 if config.train.compile is False else assumed.fusion  # blocks are compiled on GPUs
    memory = left * work.traffic / (gpu.bandwidth * assumed.bandwidth)
    update = FLOAT * UPDATE[config.optimizer.kind] * work.trained / (gpu.bandwidth * assumed.bandwidth)
    if config.optimizer.kind == "muon":
        width = float(getattr(config.model, "dim", 0))
        update += NEWTON_SCHULZ * work.blocks * width / (gpu.flops * assumed.matmul)
    inside = gpu.link * assumed.network
    outside = min(gpu.network, gpu.link) * assumed.network
    shards_over = inside if layout.shards * layout.tensor <= gpu.machine else outside
    copies_over = inside if layout.gpus <= gpu.machine else outside  # and so are stages of a pipeline
    behind = (sent.all_gather + sent.reduce_scatter) / shards_over + sent.all_reduce / copies_over
    behind += assumed.latency * sent.collectives * math.log2(max(2, layout.data)) * (layout.gpus > 1)
    waited = sent.tensor / inside + sent.all_to_all / (inside if layout.ep <= gpu.machine else outside)
    waited += sent.pipeline / copies_over
    exposed = waited + max(0.0, behind - assumed.overlap * (matmul + memory))
    return StepTime(matmul, memory, update, work.bubble * (matmul + memory), exposed, behind + waited)
