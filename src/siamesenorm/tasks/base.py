"""What a task gives the training engine, and what the engine knows of it: nothing else."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, ClassVar, NamedTuple

from pydantic import BaseModel, BeforeValidator, ConfigDict
from torch import Tensor, nn

from siamesenorm.data.batches import Batch as Batch
from siamesenorm.data.batches import Batches
from siamesenorm.errors import FieldError
from siamesenorm.field_errors import PlainModel
from siamesenorm.tasks.metrics import Metric, Metrics
from siamesenorm.tasks.sharing import Gather, Sharing, is_divided

Average = Callable[[dict[str, float]], dict[str, float]]
INIT = ("init", "first_loss")
"""Starts of the names of fields that decide first weights."""
LIMITS = {"dim": 2**17, "blocks": 4096, "heads": 2**12, "ffn_dim": 2**20}
"""Beyond these a number is a slip of the finger, not a model."""


class HowComputed:
    """Marks a field that says how a run is computed, shown or saved, and not what it learns.

    ``workers: Annotated[int, HOW] = Field(…)``: a resumed run may have another value. Of a section, it counts for all
    fields inside.
    """

    def __repr__(self) -> str:
        return "HOW"


HOW = HowComputed()


AsTuple = BeforeValidator(lambda value: tuple(value) if isinstance(value, list) else value)
"""YAML has lists alone."""


class Section(PlainModel):
    """A part of the configuration; unknown fields are refused, and text is not taken for a number."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)


class Ranks(NamedTuple):
    """Who evaluates: this rank of so many, and how they put their numbers together."""

    rank: int = 0
    world_size: int = 1
    average: Average = dict
    """Means of numbers over the ranks."""
    final: bool = False
    """Whether it is after the last step."""
    gather: Gather | None = None
    """How ranks tell each other of what is no number to average; without it, each does such work by itself."""

    def sharing(self, model: nn.Module) -> Sharing:
        """Work that is shared request by request; alone, where ranks cannot tell each other of it."""
        return Sharing() if self.gather is None else Sharing(self.rank, self.world_size, self.gather, is_divided(model))


ALONE = Ranks()


class Loss(NamedTuple):
    """What a forward pass gives the engine."""

    total: Tensor
    """Mean over the samples' parts that count; what is differentiated."""
    metrics: dict[str, Tensor]
    """Detached means by name; ``loss`` is the one that is watched and shown."""


class Task(ABC):
    """One domain. Made from a run's configuration; everything that can be wrong with it is found in `check`."""

    name: ClassVar[str]
    sections: ClassVar[dict[str, type[BaseModel]]]
    """Classes of the configuration's sections model, data and evaluation, and of further ones of its own."""
    unit: ClassVar[str] = "samples"
    """What throughput is counted in."""
    in_parts: ClassVar[bool] = False
    """Whether its model may be made on ``meta`` and given its first weights part by part."""
    mixes_pairs: bool = False
    """Whether training mixes samples in pairs, so that they are computed in even numbers."""
    metrics: ClassVar[Metrics]
    """Every number that `evaluate` gives, by its name; those of a family by what stands there up to the slash."""
    chance: ClassVar[str] = "what knowing nothing of the input gives"
    """What `chance_loss` is, in words."""
    chance_of: ClassVar[str] = "loss"
    """The number of a step that `chance_loss` is a level of; the loss where a step has none of this name."""

    @classmethod
    @abstractmethod
    def check(cls, config: Any) -> None:
        """Raise ValueError where sections do not fit each other; reads no data."""

    @abstractmethod
    def __init__(self, config: Any) -> None:
        """Open the data and check it against the model; writes nothing."""

    @classmethod
    def model_of(cls, config: Any) -> nn.Module:
        """The model of a configuration, without its data; for what uses a trained one."""
        raise NotImplementedError(f"the task {cls.name} makes no model without its data")

    @classmethod
    def sample_loss(cls, config: Any, model: nn.Module, rows: int) -> Tensor:
        """The loss of so many samples that are all alike, made where tensors are made now: to see what a step takes."""
        raise NotImplementedError(f"the task {cls.name} has no samples without its data")

    @abstractmethod
    def build_model(self) -> nn.Module:
        """The model with its first weights."""

    def notes(self) -> list[str]:
        """What is to be said of the data when training begins, a sentence each."""
        return []

    @abstractmethod
    def loader(self, *, rank: int, world_size: int, sample: int, pin_memory: bool) -> Batches:
        """Batches of a rank from a sample on."""

    @abstractmethod
    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """The loss of a batch."""

    def weight(self, batch: Batch) -> Tensor | None:
        """How many parts of a batch count, where batches of equal size differ in this; None: all count alike.

        A number on the batch's device, which is not waited for.
        """
        return None

    @abstractmethod
    def evaluate(self, model: nn.Module, ranks: Ranks = ALONE) -> dict[str, float]:
        """Metrics on held-out data, which ranks divide among themselves; every rank calls it and gets the same."""

    @classmethod
    def metric(cls, name: str) -> Metric | None:
        """What a held-out number of a name is; None if the task gives none of that name."""
        family, slash, _ = name.partition("/")
        return cls.metrics.get(family + slash)

    @abstractmethod
    def measures(self) -> Metrics:
        """The numbers that `evaluate` gives after the last step of this run, each under its full name."""

    def directions(self, names: Iterable[str]) -> dict[str, bool]:
        """Whether more is better, of those of the names that runs can be compared by."""
        known = {name: self.metric(name) for name in names}
        return {name: found.higher for name, found in known.items() if found is not None and found.higher is not None}

    @abstractmethod
    def held_out_sizes(self) -> dict[str, int]:
        """How many tokens, images, samples, … evaluation measures on; nothing where there is no evaluation."""

    @classmethod
    def init_rule(cls, config: Any) -> str:
        """How weights start, as far as the model's configuration says it; nothing where there is one rule only."""
        fields = config.model.model_dump(mode="json")
        return ", ".join(f"{name}={value}" for name, value in fields.items() if name.startswith(INIT))

    @property
    @abstractmethod
    def units_per_sample(self) -> int:
        """How many of `unit` a sample has."""

    @property
    def epoch_samples(self) -> int | None:
        """Samples after which all training data have been given once; None where there is no such number."""
        return None

    @property
    @abstractmethod
    def parameters(self) -> int:
        """How many parameters the model has, about, before it is made."""

    @abstractmethod
    def least_activations(self, recomputed: bool) -> float:
        """Numbers that backward keeps of one sample, at least; fewer where most are recomputed."""

    @abstractmethod
    def flops_per_sample(self, model: nn.Module) -> float:
        """Floating-point operations of training on one sample."""

    def chance_loss(self) -> float | None:
        """The loss of a model that has learnt nothing of its input; None where there is no such level.

        A run that ends up there has collapsed, however smooth its curve is.
        """
        return None

    @classmethod
    def for_evaluation(cls, config: Any) -> Task:
        """The task of a run whose model is only to be evaluated."""
        evaluation = config.evaluation.model_copy(update={"every": config.evaluation.every or 1})
        return cls(config.model_copy(update={"evaluation": evaluation}))

    @classmethod
    def only_trained_on(cls, config: Any) -> set[str]:
        """Names in the data section that an evaluation does not read."""
        return set()

    @classmethod
    def header(cls, config: Any, folder: Path) -> dict[str, str]:
        """What an exported file of weights says beside the model's configuration."""
        return {}

    def save_extras(self, folder: Path) -> None:  # noqa: B027  (nothing is a good default)
        """Write into the run folder what a trained model needs beside its weights."""


def check_limits(model: BaseModel, **more: int) -> None:
    """Raise ValueError where a field of a model section is beyond `LIMITS`, or beyond those of the task's own."""
    for name, most in {**LIMITS, **more}.items():
        if getattr(model, name) > most:
            raise FieldError.not_allowed(f"model.{name} =", getattr(model, name), f"up to {most}")
