"""Stages of a pipeline as a plan counts them: who has which blocks, which passes come when, what is kept and sent.

A stage keeps what its blocks keep, for every micro-batch that has been there and not come back. Buffers for what
arrives are there for all micro-batches of a step from the first step on (`torch.distributed.pipelining`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from siamesenorm.train.config import RunConfig
from siamesenorm.train.parallel.boundaries import Boundaries
from siamesenorm.train.parallel.pipeline import INTERLEAVED, divided
from siamesenorm.train.parallel.sequence import divides_tokens
from siamesenorm.train.planning.layouts import Layout
from siamesenorm.train.planning.profile import Profile, Question, whole_model

AtDepth = Callable[[int], Profile]
"""The profile of one micro-batch of a stack of so many blocks, 0 being what surrounds them."""


class Pass(NamedTuple):
    """Forward or backward of one micro-batch through one of a process's stages."""

    stage: int
    """Among the process's own."""
    forward: bool


def passes(layout: Layout, count: int, group: int) -> Iterator[Pass]:
    """What a process of one of a pipeline's groups does with so many micro-batches, in order."""
    stages = layout.stages
    if layout.schedule == INTERLEAVED:
        each = count // max(1, count // layout.pp)
        ahead = min((stages - 1) * each + 2 * (layout.pp - 1 - group), stages * count)
        there = [Pass(n // each % stages, True) for n in range(stages * count)]
        back = [Pass(stages - 1 - n // each % stages, False) for n in range(stages * count)]
        pairs = zip(there[ahead:], back, strict=False)
    else:
        there, back = [Pass(0, True)] * count, [Pass(0, False)] * count
        ahead = count if layout.schedule == "gpipe" else min(count, layout.pp - group)
        pairs = zip(back, there[ahead:], strict=False)
    yield from there[:ahead]
    for pair in pairs:
        yield from pair
    yield from back[len(there) - ahead :]


class StagePlace(NamedTuple):
    """Where in a model a stage is."""

    blocks: range
    first: bool
    """It has the embedding."""
    last: bool
    """It has the topology's end, the head and the loss."""


def places_of_group(config: RunConfig, layout: Layout, group: int) -> list[StagePlace]:
    """The stages of a process in one of a pipeline's groups."""
    model: Any = config.model
    count = layout.pp * layout.stages
    blocks = divided(int(model.blocks), count)
    return [StagePlace(blocks[n], n == 0, n == count - 1) for n in range(group, count, layout.pp)]


@dataclass(frozen=True)
class PlannedStage:
    """Bytes and work of one micro-batch in one stage."""

    place: StagePlace
    kept: float
    """From forward to backward."""
    forward: float
    """At the fullest moment of forward, beyond what it keeps."""
    backward: float
    """At the fullest moment of backward, beyond what forward has kept."""
    flops: float
    traffic: float

    @classmethod
    def of(cls, place: StagePlace, at: AtDepth) -> PlannedStage:
        """The part of a whole model's profile that is a stage's; what surrounds the blocks counts in the last one."""
        outside, start, stop = at(0), at(place.blocks.start), at(place.blocks.stop)
        behind = stop.kept - outside.kept * (not place.last)  # when forward is over, of all blocks so far
        moments = [stop.stages["backward"].alive - (stop.kept - outside.kept)]
        if place.last:
            moments = [stop.stages[name].alive - behind for name in ("head", "loss", "backward")]
        return cls(
            place,
            stop.kept - start.kept + outside.kept * place.last,
            max(0.0, stop.stages["forward"].alive - behind),
            max(0.0, *moments),
            stop.flops - start.flops + outside.flops * place.last,
            stop.traffic - start.traffic + outside.traffic * place.last,
        )


def arriving(config: RunConfig, layout: Layout, place: StagePlace) -> float:
    """Bytes of the streams of a micro-batch that a stage receives."""
    return 0.0 if place.first else streams(config, layout, place.blocks.start)


def leaving(config: RunConfig, layout: Layout, place: StagePlace) -> float:
    """Bytes of the streams of a micro-batch that a stage sends on."""
    return 0.0 if place.last else streams(config, layout, place.blocks.stop)


def streams(config: RunConfig, layout: Layout, block: int) -> float:
    """Bytes of the streams of a micro-batch in front of a block, in one process."""
    tokens = config.sample_tokens / (layout.tensor if divides_tokens(config, layout.tensor) else 1)
    return 4 * layout.micro_batch * tokens * _width(Question(config, 1, "", ""), block)


@functools.lru_cache(maxsize=256)
def _width(question: Question, block: int) -> int:
    """Numbers of one token that are carried in front of a block."""
    return sum(tensor.numel() for tensor in _boundaries(question).at(block, 1, 1)[0][:-1])


@functools.lru_cache(maxsize=8)
def _boundaries(question: Question) -> Boundaries:
    model: Any = whole_model(question.config)
    return Boundaries(model)


class StagePeak(NamedTuple):
    """What a process holds while a pass goes on, beside weights and optimiser."""

    size: float
    where: str


def fullest(
    order: Sequence[Pass],
    stages: Sequence[PlannedStage],
    gradients: Sequence[float],
    staying: Sequence[float],
    block: float,
    root: float,
) -> tuple[float, StagePeak]:
    """Bytes that micro-batches in flight keep at most, and the fullest moment of a step.

    gradients: of each stage's weights, whole until the last micro-batch. staying: what a backward pass of each stage
    leaves until the step is over. block: of one block's gathered weights, which stay gathered from a backward pass to
    the end of the next forward one; root: of those that always are.
    """
    in_flight = most = left = 0.0
    peak, summed, gathered = StagePeak(0.0, ""), [0.0] * len(stages), [False] * len(stages)
    for number, forward in order:
        stage = stages[number]
        whole = [len(one.place.blocks) * block for one in stages]
        others = sum(size for size, there in zip(whole, gathered, strict=True) if there)
        here = whole[number] if gathered[number] else 0.0
        others += in_flight + left + sum(summed) + root - here
        if forward:
            moments = [others + max(here, block), others + block + stage.kept + stage.forward]
            in_flight += stage.kept
        else:
            moments = [others + max(here, min(2 * block, whole[number])) + stage.backward]
            in_flight, left = in_flight - stage.kept, left + staying[number]
            summed[number] = gradients[number]
            moments.append(others - stage.kept + whole[number] + gradients[number])
        gathered[number], most = not forward, max(most, in_flight)
        peak = max(peak, StagePeak(max(moments), "forward" if forward else "backward"))
    return most, peak


def gatherings(order: Sequence[Pass], stages: int) -> list[int]:
    """How often each stage's blocks are gathered in a step: not behind a backward pass, which leaves them."""
    before, found = [True] * stages, [0] * stages
    for number, forward in order:
        found[number] += before[number]
        before[number] = forward
    return found
