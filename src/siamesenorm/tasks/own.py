"""A user's own model, in the same training loop as ours: any nn.Module, any data, any loss.

What makes the model, its data and its loss are values of Python, which no configuration can hold: they are given to
the process around training, and nothing that a run's folder says is ever imported or called.

with given(Given(make_model, array)):
    train(config, "runs/mine")
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from pydantic import Field
from torch import Tensor, nn

from siamesenorm.data.batches import to_device
from siamesenorm.data.packing import IGNORED
from siamesenorm.data.seeding import seeded
from siamesenorm.errors import DataError, FieldError
from siamesenorm.tasks.base import ALONE, Batch, Loss, Ranks, Section, Task
from siamesenorm.tasks.corpora import open_corpus, open_held_out
from siamesenorm.tasks.language_config import TextDataConfig
from siamesenorm.tasks.metrics import Metric, Metrics
from siamesenorm.tasks.own_data import (
    BATCHES,
    BatchSource,
    DatasetSource,
    FunctionSource,
    OwnLoader,
    TokenSource,
    call_problem,
    rows_of,
)

MakeModel = Callable[[str], nn.Module]
LossFunction = Callable[[nn.Module, Any], Any]
Setting = str | int | float | bool


class OwnModelConfig(Section):
    """A user's own model, as far as a file can say it."""

    topology: str = Field(min_length=1, max_length=500, description="What the function that makes it was given.")
    source: str = Field(default="", description="What makes it.")
    settings: dict[str, Setting] = Field(default={}, description="What else tells runs apart.")


class OwnDataConfig(Section):
    """What it learns from, as far as a file can say it."""

    train: str = Field(default="", description="A corpus: a text, a folder, an array of tokens; none: a Python value.")
    validation: str | None = Field(default=None, description="A corpus that is held out.")
    sha256: str | None = Field(default=None, description="Of tokens in memory.")
    sequence_length: int = Field(default=1, ge=1, le=2**24, description="Tokens of a sequence.")


class OwnEvaluationConfig(Section):
    """What is measured on held-out data."""

    every: int | None = Field(default=1000, ge=1, description="Steps between evaluations, also at the end; null: none.")
    batches: int = Field(default=BATCHES, ge=1, le=10**6, description="Held-out batches of a function.")


@dataclass(frozen=True)
class Given:
    """What a configuration cannot hold."""

    make_model: MakeModel
    data: Any = None
    """A value of Python, a name, or nothing; a corpus that the configuration names goes before it."""
    validation: Any = None
    loss: LossFunction | None = None


_given: ContextVar[Given | None] = ContextVar("given", default=None)


@contextlib.contextmanager
def given(parts: Given | None) -> Iterator[None]:
    """Runs in here train this model; None: those that have models of ours."""
    before = _given.set(parts)
    try:
        yield
    finally:
        _given.reset(before)


class OwnTask(Task):
    """Whatever the given loss says."""

    name = "own model"
    sections = {  # noqa: RUF012
        "model": OwnModelConfig,
        "data": OwnDataConfig,
        "evaluation": OwnEvaluationConfig,
    }
    decided_by: ClassVar[str] = "how much is held out; validation= gives more"
    metrics: ClassVar[Metrics] = {
        "loss": Metric(higher=False, of="samples"),
        "accuracy": Metric(higher=True, of="samples"),
    }

    @classmethod
    def check(cls, config: Any) -> None:
        """Raise ValueError where a batch would have to be cut, which only its author knows how to do."""
        wish = config.train.micro_batch_size
        if wish is not None:
            raise FieldError.not_allowed("train.micro_batch_size =", wish, "null", "for a model of your own")

    def __init__(self, config: Any) -> None:
        parts = _given.get()
        if parts is None:
            raise DataError(
                f"model: {config.model.source or 'the model of this run'!r} is made by code of your own; "
                "siamesenorm.compare(make_model, …) or compare --model FILE.py:NAME trains it"
            )
        self.given, self.topology, self.seed = parts, config.model.topology, config.train.seed
        self.batch_size, self.length = config.train.batch_size, config.data.sequence_length
        self.source = open_batches(parts, config)
        self.evaluated = config.evaluation.every is not None

    @classmethod
    def model_of(cls, config: Any) -> nn.Module:
        """Nobody else can make it."""
        raise DataError(
            f"run: its model is made by code of your own ({config.model.source or 'unknown'}), which a run does not "
            "hold; make it in Python and load weights.safetensors into it"
        )

    def build_model(self) -> nn.Module:
        """What the function makes of the topology, with first weights of the seed."""
        check_maker(self.given.make_model, self.topology)
        with seeded(self.seed):
            model = self.given.make_model(self.topology)
        if not isinstance(model, nn.Module):
            raise DataError(
                f"model: {name_of(self.given.make_model)} gave a {type(model).__name__} for {self.topology!r}; "
                "it takes a function that returns an nn.Module"
            )
        if next(model.parameters(), None) is None:
            raise DataError(f"model: {type(model).__name__} has no parameters; it takes a model that can learn")
        return model

    def loader(self, *, rank: int, world_size: int, sample: int, pin_memory: bool) -> OwnLoader:
        """The batches of the seed; one process has them all."""
        if world_size > 1:
            raise DataError("model: one of your own trains in one process; it takes no torchrun")
        return OwnLoader(self.source, self.seed, self.batch_size, sample)

    def loss(self, model: nn.Module, batch: Batch) -> Loss:
        """The given loss, or the cross-entropy of labels."""
        found = (self.given.loss or cross_entropy)(model, batch["batch"])
        total, more = found if isinstance(found, tuple) and len(found) == 2 else (found, {})
        if not isinstance(total, Tensor) or total.numel() != 1 or not isinstance(more, dict):
            shape = f" of shape {tuple(total.shape)}" if isinstance(total, Tensor) else ""
            raise DataError(
                f"loss: it gave a {type(total).__name__}{shape}; it takes a tensor of one number, or that and a "
                "dictionary of further numbers"
            )
        total = total.reshape(())
        others = {str(name): torch.as_tensor(value).detach().to(total).reshape(()) for name, value in more.items()}
        return Loss(total, {"loss": total.detach(), **others})

    @torch.no_grad()
    def evaluate(self, model: nn.Module, ranks: Ranks = ALONE) -> dict[str, float]:
        """Means over the held-out batches: each by its labels that count, or by its rows under a loss of one's own."""
        device = next(model.parameters()).device
        sums: dict[str, float] = {}
        whole = 0
        for batch in self.source.held_out(self.batch_size):
            count = rows_of(batch) if self.given.loss else int((inputs_and_labels(batch)[1] != IGNORED).sum())
            if not count:
                continue
            for name, value in self.loss(model, {"batch": to_device(batch, device)}).metrics.items():
                sums[name] = sums.get(name, 0.0) + float(value) * count
            whole += count
        return {name: total / whole for name, total in sums.items()}

    def measures(self) -> Metrics:
        """The loss; what else a loss gives is known when it is asked."""
        return {"loss": self.metrics["loss"]} if self.evaluated else {}

    def held_out_sizes(self) -> dict[str, int]:
        """Tokens, or samples."""
        return {self.unit: self.source.held_out_size(self.batch_size)} if self.evaluated else {}

    @classmethod
    def init_rule(cls, config: Any) -> str:
        """What the model's author wrote."""
        return "the model's own"

    @property
    def units_per_sample(self) -> int:
        """Tokens of a sequence, or 1."""
        return self.length

    @property
    def parameters(self) -> int:
        """Not known before it is made."""
        return 0

    def least_activations(self, recomputed: bool) -> float:
        """Not known."""
        return 0.0

    def flops_per_sample(self, model: nn.Module) -> float:
        """Not known."""
        return 0.0

    def chance_loss(self) -> float | None:
        """Known of tokens under the cross-entropy."""
        return self.source.chance_loss() if self.given.loss is None else None


class OwnLanguageTask(OwnTask):
    """The next token of texts or arrays of tokens."""

    name = "own language model"
    unit = "tokens"
    metrics: ClassVar[Metrics] = {
        "loss": Metric(higher=False, of="tokens", unit="nats"),
        "accuracy": Metric(higher=True, of="tokens"),
    }
    chance = "what frequencies of tokens alone give"


def open_batches(parts: Given, config: Any) -> BatchSource:
    """The data of a run: what was given, or the corpus that its configuration names."""
    data, other, length = parts.data, parts.validation, config.data.sequence_length
    if config.data.train:
        named = {"train": config.data.train, "validation": config.data.validation, "sequence_length": length}
        texts = TextDataConfig(**named)
        return TokenSource([open_corpus(name, texts, "train") for name in texts.train], open_held_out(texts), length)
    kind = given_kind(parts)
    if kind == "function":
        return FunctionSource(data, config.evaluation.batches, other)
    return DatasetSource(data, other) if kind == "dataset" else TokenSource.of_array(data, other, length)


def given_kind(parts: Given) -> str:
    """What kind of data was given; those that are held out are of the same."""
    kind = kind_of(parts.data)
    if parts.validation is not None and kind_of(parts.validation) != kind:
        raise DataError.wrong_kind("validation", parts.validation, f"the kind of data that is learnt from: {kind}")
    return kind


def kind_of(data: Any) -> str:
    """tokens, dataset or function, by what a value can do."""
    if isinstance(data, (Tensor, list, tuple)) or hasattr(data, "__array__"):
        return "tokens"
    if hasattr(data, "__getitem__") and hasattr(data, "__len__") and not isinstance(data, (dict, str, bytes)):
        return "dataset"
    if callable(data):
        return "function"
    raise DataError.wrong_kind(
        "data",
        data,
        "an array of tokens, the name of a text or folder, a Dataset with a length, or a function of 'train' or 'val' "
        "that gives a batch",
    )


def cross_entropy(model: nn.Module, batch: Any) -> Tensor:
    """Of what a model says of the labels: ``(inputs, labels)``, or a dictionary with input_ids and labels."""
    inputs, labels = inputs_and_labels(batch)
    try:
        output = model(inputs)
    except IndexError as error:
        largest = int(inputs.max()) if isinstance(inputs, Tensor) and inputs.numel() else "unknown"
        raise DataError(
            f"data: the model cannot look up its inputs, the largest of which is {largest} ({error}); "
            "it takes ids of its vocabulary, in sequences of its length"
        ) from error
    scores = getattr(output, "logits", output[0] if isinstance(output, tuple) else output)
    if not isinstance(scores, Tensor) or scores.shape[:-1] != labels.shape:
        shape = f" of shape {tuple(scores.shape)}" if isinstance(scores, Tensor) else ""
        raise DataError(
            f"loss: the model gave a {type(scores).__name__}{shape} for labels of shape {tuple(labels.shape)}; "
            "the default loss takes logits, one row of scores a label; give loss= for others"
        )
    try:
        return F.cross_entropy(scores.flatten(0, -2).float(), labels.flatten().long())
    except IndexError as error:
        raise DataError(
            f"data: {error} The model gives {scores.shape[-1]} scores; labels are 0 to {scores.shape[-1] - 1}, or -100"
        ) from None


def inputs_and_labels(batch: Any) -> tuple[Any, Tensor]:
    """The two parts of a batch that the default loss takes."""
    if isinstance(batch, dict) and {"input_ids", "labels"} <= batch.keys():
        batch = (batch["input_ids"], batch["labels"])
    if not isinstance(batch, (tuple, list)) or len(batch) != 2:
        raise DataError("loss: the default one takes batches (inputs, labels); give loss= for others")
    inputs, labels = batch
    if not isinstance(labels, Tensor) or labels.is_floating_point() or labels.is_complex():
        kind = f"tensor of {labels.dtype}" if isinstance(labels, Tensor) else type(labels).__name__
        raise DataError(f"loss: the labels are a {kind}; the default loss takes whole numbers; give loss= for others")
    return inputs, labels


def name_of(function: Any) -> str:
    """What a function is called."""
    return str(getattr(function, "__qualname__", type(function).__name__))


def check_model(task: OwnTask) -> None:
    """Raise where the function gives no new models, or one gives no loss; nothing is trained."""
    model, other = task.build_model(), task.build_model()
    if model is other:
        raise DataError(
            f"model: {name_of(task.given.make_model)} gives the same model at every call; it takes a function that "
            "makes a new one"
        )
    if isinstance(task.source, FunctionSource):
        task.source.check()
    batch = task.source.batch(task.seed, 0, task.batch_size)
    device = next(model.parameters()).device
    moved = to_device(batch, device)
    with seeded(task.seed):
        loss = task.loss(model, {"batch": moved})
    if not loss.total.requires_grad:
        raise DataError("loss: it does not depend on the model's parameters; it takes one that can be differentiated")


def check_maker(make_model: Any, topology: str) -> None:
    """Raise where what is to make models is a model itself, or cannot be given a topology."""
    if isinstance(make_model, nn.Module):
        raise DataError.wrong_kind("model", make_model, "a function that is given a topology and returns a fresh model")
    if problem := call_problem(make_model, topology):
        raise DataError(
            f"model: {name_of(make_model)} cannot be given a topology ({problem}); it takes a function of one argument"
        )
