"""Bytes that a step sends and the time it would take on a GPU, by data sheets and stated assumptions."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, NamedTuple

from siamesenorm.train.config import RunConfig
from siamesenorm.train.planning.hardware import GPU, Assumptions
from siamesenorm.train.planning.layouts import Layout, has_vocabulary_divided
from siamesenorm.train.planning.needs import FLOAT, Parts, tensor_sums
from siamesenorm.train.planning.profile import Profile
from siamesenorm.train.sequence_parallel import divides_tokens

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
    collectives: int = 0

    @property
    def all(self) -> float:
        """Bytes."""
        return self.all_gather + self.reduce_scatter + self.all_reduce + self.tensor + self.all_to_all


def sent_by(config: RunConfig, layout: Layout, parts: Parts) -> Sent:
    """What a process of a layout sends in a step. parts: of the model that it has itself."""
    times = layout.parts(config.train.batch_size)
    blocks = int(getattr(config.model, "blocks", 1))
    gradients = FLOAT * parts.trained
    gathered = scattered = reduced = tensor = summed = 0.0
    count = 0
    if layout.shards > 1:
        share, few = (layout.shards - 1) / layout.shards, layout.shards / layout.ep
        width = 2 if config.train.precision == "bf16" else FLOAT
        experts = (few - 1) / few * parts.experts  # a process's own, which fewer processes shard
        # Blocks and embedding on the way there and back, the root once.
        blocks_sent = share * (parts.blocks - parts.experts) + experts
        gathered = times * (2 * width * blocks_sent + share * FLOAT * (2 * parts.embedding + parts.root))
        scattered = share * (gradients - FLOAT * parts.experts) + FLOAT * experts
        count += (2 * blocks + 3) * times + blocks + 2
    if layout.replicas > 1:
        held = (gradients - FLOAT * parts.experts) / layout.shards + FLOAT * parts.experts * layout.ep / layout.shards
        reduced = 2 * (layout.replicas - 1) / layout.replicas * held
        count += blocks + 2
    if layout.tensor > 1:
        block, around = tensor_passes(config, layout)
        share, whole = (layout.tensor - 1) / layout.tensor, tensor_sums(layout, config)
        width = FLOAT if config.train.precision == "fp32" else 2
        tensor = times * share * whole * (blocks * block.all + around.all * FLOAT / width)
        summed = times * share * whole * (blocks * block.scattered + around.scattered * FLOAT / width)
        count += times * 4 * blocks
    travelled = exchanged(config, layout, times * blocks)
    return Sent(gathered, scattered, reduced, tensor, summed, travelled, count + (4 * times * blocks) * (layout.ep > 1))


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
class StepTime:
    """Seconds of a step, by what they go to."""

    matmul: float
    memory: float
    optimizer: float
    exposed: float
    """Sending that nothing is computed beside."""
    network: float
    """All sending."""

    @property
    def seconds(self) -> float:
        """Of the whole step."""
        return self.matmul + self.memory + self.optimizer + self.exposed


def step_time(
    config: RunConfig, layout: Layout, found: Profile, parts: Parts, gpu: GPU, assumed: Assumptions
) -> StepTime:
    """An estimate. found: of one part of a process's batch."""
    times = layout.parts(config.train.batch_size)
    peak = gpu.flops if config.train.precision != "fp32" else gpu.flops_fp32 if config.train.tf32 else gpu.flops / 16
    matmul = times * found.flops / (peak * assumed.matmul)
    left = 1.0 if config.train.compile is False else assumed.fusion  # blocks are compiled on GPUs
    memory = times * left * found.traffic / (gpu.bandwidth * assumed.bandwidth)
    update = FLOAT * UPDATE[config.optimizer.kind] * parts.trained / layout.shards / (gpu.bandwidth * assumed.bandwidth)
    if config.optimizer.kind == "muon":
        width = float(getattr(config.model, "dim", 0))
        update += NEWTON_SCHULZ * parts.blocks * width / (gpu.flops * assumed.matmul)
    sent = sent_by(config, layout, parts)
    inside = gpu.link * assumed.network
    outside = min(gpu.network, gpu.link) * assumed.network
    shards_over = inside if layout.shards * layout.tensor <= gpu.machine else outside
    copies_over = inside if layout.gpus <= gpu.machine else outside
    behind = (sent.all_gather + sent.reduce_scatter) / shards_over + sent.all_reduce / copies_over
    behind += assumed.latency * sent.collectives * math.log2(max(2, layout.data)) * (layout.gpus > 1)
    waited = sent.tensor / inside + sent.all_to_all / (inside if layout.ep <= gpu.machine else outside)
    exposed = waited + max(0.0, behind - assumed.overlap * (matmul + memory))
    return StepTime(matmul, memory, update, exposed, behind + waited)
