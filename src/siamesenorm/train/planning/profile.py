"""A step of one process that holds a whole model: memory by stage, work and traffic, before the model is made.

Blocks of a stack are alike, so two small stacks of two and of three blocks are traced, and every quantity grows from
there as it grows between them. What links keep of streams that grow with depth is seen on a narrow stack of full depth.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import torch
from torch import nn

from siamesenorm.errors import ConfigError
from siamesenorm.layers.cross_entropy import chunk_tokens
from siamesenorm.models.counts import NARROW, kept_by_links
from siamesenorm.models.stack import Stack
from siamesenorm.tasks import find_task
from siamesenorm.train.activations import checkpoint_activations
from siamesenorm.train.config import RunConfig
from siamesenorm.train.parameters import choose_parameters
from siamesenorm.train.planning.stand_ins import pretend_divided, pretend_exchanged
from siamesenorm.train.planning.tracing import Moment, Trace, shapes_alone, trace_step
from siamesenorm.train.precision import DTYPES, autocast

FEW, MORE = 2, 3
"""Blocks of the stacks that are traced."""
STAGES = ("embedding", "forward", "head", "loss", "backward", "end")
"""Before the first block; the last block; behind it; backward of the loss, of the last block, of the first one."""


class UncountableError(ConfigError):
    """A step that cannot be counted: it looks at values, or its task has no samples without data."""


class StageMemory(NamedTuple):
    """Bytes at the fullest moment of a stage."""

    alive: float
    """All that the step has made but gradients of weights."""
    gradients: float
    casts: float
    """Of what is alive: copies of blocks' weights in a lower precision, which sharded blocks do not need."""


@dataclass(frozen=True)
class Profile:
    """Bytes and work of a step of one process, of one part of its batch."""

    stages: dict[str, StageMemory]
    kept: float = 0.0
    gradients: float = 0.0
    flops: float = 0.0
    traffic: float = 0.0

    @classmethod
    def of(cls, trace: Trace, blocks: int) -> Profile:
        """A trace of so many blocks, its stages named from both ends."""
        last = max(blocks - 1, 0)
        places = (("forward", -1), ("forward", last), ("head", 0), ("backward", blocks), ("backward", last))
        moments = [trace.stages.get(place, Moment()) for place in places]
        first = trace.stages.get(("backward", 0), Moment())
        moments.append(max(first, trace.stages.get(("end", 0), Moment()), key=lambda moment: moment.both))
        stages = {name: StageMemory(m.alive, m.gradients, m.casts) for name, m in zip(STAGES, moments, strict=True)}
        return cls(stages, trace.kept, trace.gradients, trace.flops, trace.traffic)

    def towards(self, other: Profile, share: float) -> Profile:
        """``self + share · (other - self)`` of everything; a share above 1 goes beyond the other."""

        def between(a: float, b: float) -> float:
            return max(0.0, a + share * (b - a))

        stages = {name: StageMemory(*map(between, stage, other.stages[name])) for name, stage in self.stages.items()}
        numbers = {
            name: between(getattr(self, name), getattr(other, name))
            for name in ("kept", "gradients", "flops", "traffic")
        }
        return Profile(stages, **numbers)

    def fuller(self, size: float, stages: Iterable[str] = ("forward", "head", "loss", "backward")) -> Profile:
        """The same with more kept from forward to backward."""
        changed = {
            name: stage._replace(alive=stage.alive + size * (name in stages)) for name, stage in self.stages.items()
        }
        return Profile(changed, self.kept + size, self.gradients, self.flops, self.traffic)


@dataclass(frozen=True)
class Question:
    """What a profile is asked for; equal questions have one answer."""

    config: RunConfig
    rows: int
    """Samples of one part of a batch."""
    device: str
    """``cpu`` or ``cuda``."""
    checkpointing: str
    gathered: bool = False
    """Whether blocks' weights are sharded and gathered in the lower precision that they are computed in."""
    tokens: int = 1
    """Parts of a sequence, of which a process carries one between sublayers."""
    ep: int = 1
    """Processes that tokens travel between to the experts they chose."""

    @functools.cached_property
    def key(self) -> str:
        """All that decides the answer."""
        c = self.config
        sections = [section.model_dump_json() for section in (c.model, c.lora)]
        steps = c.train.precision, c.train.parameters, c.train.checkpointed_every
        return repr((c.task, c.sample_tokens, steps, self.rows, self.device, sections, self.checkpointing,
                     self.gathered, self.tokens, self.ep))  # fmt: skip

    def __hash__(self) -> int:
        return hash(self.key)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Question) and self.key == other.key


def grown(question: Question, depth: int | None = None) -> Profile:
    """A profile of a part of any size, from profiles of two others: all grows with the samples.

    The head's logits do so up to a chunk of tokens, so that the two lie on the same side of it. depth: of so many
    blocks, of none too; default: of all.
    """
    config: Any = question.config
    vocabulary = getattr(config.model, "vocab_size", None)
    chunk = 1 if vocabulary is None else -(-chunk_tokens(vocabulary) // config.sample_tokens)
    few, more = (1, chunk) if question.rows < chunk else (chunk, 2 * chunk)
    if question.rows in (few, more):
        return profile(question, depth)
    small, large = (profile(replace(question, rows=rows), depth) for rows in (few, more))
    return small.towards(large, (question.rows - few) / (more - few))


@functools.lru_cache(maxsize=1024)
def profile(question: Question, depth: int | None = None) -> Profile:
    """The answer, from traces of few blocks; where some blocks are computed again, between those of none and of all.

    depth: of so many of the blocks; default: of all.
    """
    blocks, every = int(getattr(question.config.model, "blocks", 0)), question.config.train.checkpointed_every
    if every > 1 and blocks and question.checkpointing != "none":
        steps = question.config.train.model_copy(update={"checkpointed_every": 1})
        of_all = replace(question, config=question.config.model_copy(update={"train": steps}))
        none, all_of_them = (profile(q, depth) for q in (replace(of_all, checkpointing="none"), of_all))
        return mixed(none, all_of_them, blocks // every / blocks)
    if depth is None and blocks <= MORE:
        return traced(question, blocks)
    depth = blocks if depth is None else depth
    few, more = traced(question, FEW), traced(question, MORE)
    found = few.towards(more, (depth - FEW) / (MORE - FEW))
    extra = growth(question, depth) if depth > FEW else 0.0
    return found.fuller(extra) if extra else found


def mixed(none: Profile, all_of_them: Profile, share: float) -> Profile:
    """Where so large a share of the blocks is computed again; backward of one of them holds all of that block."""
    found = none.towards(all_of_them, share)
    if not share:
        return found
    beside = [of.stages["backward"].alive - of.kept for of in (all_of_them, none)]
    backward = found.stages["backward"]
    fuller = backward._replace(alive=backward.alive + (1 - share) * max(0.0, beside[0] - beside[1]))
    return replace(found, stages={**found.stages, "backward": fuller})


@functools.lru_cache(maxsize=512)
def traced(question: Question, blocks: int) -> Profile:
    """The profile of a stack of exactly so many blocks."""
    config = question.config
    if blocks:
        config = config.model_copy(update={"model": config.model.model_copy(update={"blocks": blocks})})
    task, dtype = find_task(config.task), DTYPES.get(config.train.precision)
    model = whole_model(config)
    checkpoint_activations(model, question.checkpointing)
    pretend_divided(model, question.tokens)
    pretend_exchanged(model, question.ep)
    if question.gathered and isinstance(model, Stack):
        model.blocks.to(dtype)
    with shapes_alone(question.device):
        model.to_empty(device="cpu")
        try:
            trace = trace_step(
                model, lambda model: task.sample_loss(config, model, question.rows), autocast("cpu", dtype)
            )
        except (NotImplementedError, RuntimeError) as error:
            problem = " ".join(str(error).split())[:200]
            raise UncountableError.refused("task", config.task, f"a step of it cannot be counted: {problem}") from error
    return Profile.of(trace, blocks)


def whole_model(config: RunConfig) -> nn.Module:
    """A run's model on no device, frozen where it is not trained."""
    with torch.device("meta"):
        model = find_task(config.task).model_of(config)
    choose_parameters(model, config)
    return model.train()


def growth(question: Question, blocks: int) -> float:
    """Bytes that links keep beyond what they would if every block kept as much as the third: streams may grow."""
    config: Any = question.config
    norms = _norms(question)
    if norms is None:
        return 0.0
    few, more, all_of_them = (_kept(config.model.topology, count, norms) for count in (FEW, MORE, blocks))
    if question.checkpointing == "full":
        beyond = (all_of_them - _kept(config.model.topology, blocks - 1, norms)) - (more - few)
    else:
        beyond = all_of_them - few - (blocks - FEW) * (more - few)
    tokens = (getattr(config.model, "tokens", None) or config.sample_tokens) / question.tokens
    return max(0.0, beyond) * config.model.dim * tokens * question.rows * 4 if abs(beyond) > 0.5 else 0.0


@functools.lru_cache(maxsize=256)
def _kept(topology: str, blocks: int, norms: Any) -> float:
    return kept_by_links(topology, blocks, norms, NARROW) / NARROW


def _norms(question: Question) -> Any:
    """How the norms of a stack are made; None where a model is no stack."""
    config = question.config
    model = whole_model(config.model_copy(update={"model": config.model.model_copy(update={"blocks": FEW})}))
    return model.residual.norms if isinstance(model, Stack) else None
