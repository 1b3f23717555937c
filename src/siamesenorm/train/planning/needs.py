"""Memory of one process of a layout: weights, gradients, optimiser, activations, and the fullest moment of a step.

What a step makes comes from `Profile`. What sharding adds to it is known: the root (head and last norms) stays
gathered, with it the block that is computed and, on the way back, the next one.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from siamesenorm.models.stack import Stack
from siamesenorm.train.config import RunConfig
from siamesenorm.train.optimizer import parameter_groups
from siamesenorm.train.parallel.experts import experts_of, stacked
from siamesenorm.train.parallel.sequence import divides_tokens
from siamesenorm.train.planning.layouts import Layout, of_process
from siamesenorm.train.planning.profile import Question, StageMemory, grown, whole_model
from siamesenorm.train.planning.stages import (
    AtDepth,
    PlannedStage,
    StagePlace,
    arriving,
    fullest,
    leaving,
    passes,
    places_of_group,
)

FLOAT = 4
MUON_COPIES = 5
"""Of one matrix while it is made orthogonal, its gathered whole among them."""


@dataclass(frozen=True)
class Parts:
    """Parameters of a model by what is gathered together."""

    blocks: int
    block: int
    """The largest one."""
    embedding: int
    """Where it is gathered by itself."""
    root: int
    trained: int
    moments: int
    """Numbers that the optimiser keeps."""
    largest: int
    """Of the matrices that Muon updates."""
    experts: int = 0
    """Of the blocks' parameters, those of experts."""
    links: int = 0
    """Of all, the topology's own."""

    @property
    def all(self) -> int:
        """Parameters."""
        return self.blocks + self.embedding + self.root


@dataclass(frozen=True)
class Need:
    """Bytes of one process."""

    weights: float
    gradients: float
    optimizer: float
    """Moments, and averaged weights where there are any."""
    activations: float
    """What one part of a batch keeps from forward to backward."""
    peak: float
    """The fullest moment; less than the sum where gradients come while activations go."""
    where: str
    """The stage of that moment."""

    @property
    def state(self) -> float:
        """What is there between steps, and gradients."""
        return self.weights + self.gradients + self.optimizer


def parts_of(config: RunConfig) -> Parts:
    """Parameters of a run's model, or of one process of a tensor group."""
    return _parts(Question(config, 1, config.optimizer.kind, ""))


@functools.lru_cache(maxsize=64)
def _parts(question: Question) -> Parts:
    config = question.config
    model: Any = whole_model(config)
    sizes = [sum(p.numel() for p in block.parameters()) for block in getattr(model, "blocks", ())]
    apart = getattr(model, "embedding", None) if getattr(model, "head", None) is not None else None
    embedding = sum(p.numel() for p in apart.parameters()) if isinstance(apart, torch.nn.Module) else 0
    total = sum(p.numel() for p in model.parameters())
    groups = parameter_groups(model, config.optimizer)
    moments = sum((1 if group["muon"] else 2) * p.numel() for group in groups for p in group["params"])
    largest = max((p.numel() for group in groups if group["muon"] for p in group["params"]), default=0)
    trained = sum(p.numel() for p in model.parameters() if p.requires_grad)
    experts = sum(p.numel() for moe in experts_of(model) for p in stacked(moe).values())
    root = total - sum(sizes) - embedding
    links = sum(p.numel() for p in model.residual_parameters().values()) if isinstance(model, Stack) else 0
    return Parts(sum(sizes), max(sizes, default=0), embedding, root, trained, moments, largest, experts, links)


def need_of(config: RunConfig, layout: Layout, device: str, at: AtDepth | None = None) -> Need:
    """What one process of a layout needs; in a pipeline, one of the fullest group.

    device: ``cpu`` or ``cuda``. at: profiles of one part of its batch by number of blocks, where these are known.
    """
    at = at or at_depth(config, layout, device)
    if layout.pp > 1:
        needs = [need_of_group(config, layout, at, group, device) for group in range(layout.pp)]
        return max(needs, key=lambda need: need.peak)
    found = at(int(getattr(config.model, "blocks", 0)))
    parts, held = own_parts(config, layout)
    several = layout.parts(config.train.batch_size) > 1
    stages = {name: stage_bytes(name, stage, parts, layout, config, several) for name, stage in found.stages.items()}
    return fullest_need(config, layout, parts, held, stages, found.kept, device)


def need_of_group(config: RunConfig, layout: Layout, at: AtDepth, group: int, device: str) -> Need:
    """What one process of a pipeline's group needs."""
    places, count = places_of_group(config, layout, group), layout.parts(config.train.batch_size)
    all_of_them, of_shards = own_parts(config, layout)
    parts, held = (of_places(found, places, config) for found in (all_of_them, of_shards))
    gradients = [FLOAT * of_places(all_of_them, [place], config).trained for place in places]
    sharded = layout.shards > 1
    block = gathered_block(config, layout, all_of_them) if sharded else 0.0
    root = FLOAT * (parts.root + parts.embedding) if sharded else 0.0
    order, stages = list(passes(layout, count, group)), [PlannedStage.of(place, at) for place in places]
    outside = [arriving(config, layout, place) + leaving(config, layout, place) for place in places]
    # What several stages of a process send is waited for, and held, until the end of a step.
    staying = outside if layout.stages > 1 else [0.0] * len(places)
    kept, moment = fullest(order, stages, gradients, staying, block, root)
    buffers = count * sum(outside)
    moments = {f"{moment.where} of group {group}": buffers + moment.size + tensor_sums(layout, config)}
    if sharded:  # all blocks are gathered, and gradients whole, when the first is summed and scattered
        gathered = root + block * sum(len(place.blocks) for place in places)
        moments["end"] = buffers + sum(gradients) + gathered + 2 * FLOAT * max(parts.block, parts.root)
    return fullest_need(config, layout, parts, held, moments, kept, device)


def own_parts(config: RunConfig, layout: Layout) -> tuple[Parts, Parts]:
    """Parameters of the model that a process computes, and of what all of its shards have together."""
    return parts_of(of_process(config, layout)), parts_of(of_process(config, replace(layout, ep=1)))


def of_places(parts: Parts, places: Sequence[StagePlace], config: RunConfig) -> Parts:
    """Parameters of some stages of a pipeline, of those of all."""
    model: Any = config.model
    share = sum(len(place.blocks) for place in places) / int(model.blocks)
    embedding = parts.embedding * any(place.first for place in places)
    root = parts.root * any(place.last for place in places)
    blocks = round(parts.blocks * share)
    outside = 2 * (parts.embedding + parts.root)  # moments of what AdamW updates, whatever updates the blocks
    return replace(
        parts,
        blocks=blocks,
        embedding=embedding,
        root=root,
        trained=blocks + embedding + root,
        moments=round((parts.moments - outside) * share) + 2 * (embedding + root),
        experts=round(parts.experts * share),
        links=round(parts.links * share),
    )


def fullest_need(
    config: RunConfig,
    layout: Layout,
    parts: Parts,
    held: Parts,
    stages: dict[str, float],
    kept: float,
    device: str,
) -> Need:
    """What a process needs, by what it holds in each stage of a step. parts, held: see `own_parts`."""
    shards, ema = layout.shards, config.train.ema is not None
    weights, gradients = FLOAT * held.all / shards, FLOAT * held.trained / shards
    optimizer = FLOAT * (held.moments + held.trained * ema) / shards
    copies = MUON_COPIES * (2 if device == "cuda" else FLOAT) * parts.largest
    if not config.optimizer.fused and config.optimizer.kind == "adamw":
        copies = int(FLOAT * held.trained / shards)
    stages = {**stages, "optimiser": gradients + copies}
    where = max(stages, key=lambda name: stages[name])
    return Need(weights, gradients, optimizer, kept, weights + optimizer + stages[where], where)


def at_depth(config: RunConfig, layout: Layout, device: str) -> AtDepth:
    """Profiles of one part of a process's batch, traced as it is."""
    # The CPU's kernels take float32 alone: links with gathered gains take plain operators, which keep more.
    gathered = device == "cpu" and layout.shards > 1 and config.train.precision == "bf16"
    question = question_of(config, layout, device, gathered)
    blocks = int(getattr(config.model, "blocks", 0))
    return lambda depth: grown(question, None if depth == blocks else depth)


def question_of(config: RunConfig, layout: Layout, device: str, gathered: bool = False) -> Question:
    """What is asked of one process of a layout."""
    tokens = layout.tensor if divides_tokens(config, layout.tensor) else 1
    own = of_process(config, layout)
    return Question(own, layout.micro_batch, device, layout.checkpointing, gathered, tokens, layout.ep)


def stage_bytes(name: str, stage: StageMemory, parts: Parts, layout: Layout, config: RunConfig, several: bool) -> float:
    """What a stage holds beside weights and optimiser. several: whether a process computes more parts than one."""
    whole = FLOAT * parts.trained
    summed = tensor_sums(layout, config) if name in ("forward", "backward") else 0.0
    if layout.shards == 1:
        # DDP's buckets are there from the first step on; gradients of earlier parts lie beside them, in no bucket.
        buckets = whole if layout.mode == "ddp" or layout.data > 1 else 0.0
        before = whole if several and name != "end" else 0.0 if buckets else stage.gradients
        return stage.alive + summed + buckets + before
    low = config.train.precision == "bf16"
    block = gathered_block(config, layout, parts)
    root = FLOAT * parts.root
    alive = stage.alive + summed - (stage.casts if low else 0.0)
    kept = whole if several else 0.0  # summed over processes behind the last part only, and whole till then
    if name == "embedding":
        return alive + kept + 2 * root + 2 * FLOAT * parts.embedding
    if name == "backward":
        return alive + root + 2 * block + (kept or stage.gradients)
    if name == "end":
        return alive + 3 * root + FLOAT * parts.embedding + max(kept and FLOAT * parts.block, whole / layout.shards)
    return alive + kept + root + block


def gathered_block(config: RunConfig, layout: Layout, parts: Parts) -> float:
    """Bytes of one block's weights where they are sharded and gathered."""
    size: float = parts.block
    if layout.ep == layout.shards:  # a process's experts are nobody else's, and never gathered
        size -= parts.experts / max(1, int(getattr(config.model, "blocks", 1)))
    return size * (2 if config.train.precision == "bf16" else FLOAT)


def tensor_sums(layout: Layout, config: RunConfig) -> float:
    """Bytes of a sublayer's output that tensor groups sum: the sum lies beside its part."""
    if layout.tensor == 1:
        return 0.0
    model: Any = config.model
    tokens = getattr(model, "tokens", None) or config.sample_tokens
    return layout.micro_batch * tokens * model.dim * (FLOAT if config.train.precision == "fp32" else 2)
