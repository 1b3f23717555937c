"""Everything that decides a training run: typed, frozen, every field documented, round-trips through YAML.

The sections here are the same for every task. ``model``, ``data`` and ``evaluation`` are the task's own; see
`siamesenorm.tasks`. `siamesenorm.train.recipes` makes a `RunConfig` from a recipe and overrides.
"""

from __future__ import annotations

import math
from typing import Annotated, Any, Literal

from pydantic import BaseModel, Field, PrivateAttr, SerializeAsAny, model_validator

from siamesenorm.errors import FieldError
from siamesenorm.tasks.base import HOW, AsTuple, HowComputed, Section

Names = Annotated[tuple[str, ...], AsTuple]
LARGEST_STEPS = 10**9
LARGEST_BATCH = 2**24
BatchCount = Annotated[int, Field(ge=1, le=LARGEST_BATCH)]


class OptimizerConfig(Section):
    """AdamW, or Muon with AdamW, and what happens to gradients before it."""

    kind: Literal["adamw", "muon"] = Field(
        default="adamw",
        description="adamw; muon: orthogonalised momentum for the matrices of attention and FFN, AdamW for the rest.",
    )
    lr: float = Field(gt=0, le=1e3, description="Peak learning rate.")
    beta1: float = Field(default=0.9, ge=0, lt=1, description="Decay of the mean of gradients.")
    beta2: float = Field(default=0.95, ge=0, lt=1, description="Decay of the mean of squared gradients.")
    momentum: float = Field(default=0.95, ge=0, lt=1, description="Decay of the mean of gradients, Muon's.")
    eps: float = Field(default=1e-8, gt=0, description="Added to the root of the mean of squared gradients.")
    weight_decay: float = Field(default=0.1, ge=0, description="Decay of matrices, times the learning rate.")
    decay_embeddings: bool = Field(default=True, description="Whether embeddings are decayed as other matrices are.")
    decay_vectors: bool = Field(default=False, description="Whether norm gains, biases and other vectors are decayed.")
    clip: float | None = Field(default=1.0, gt=0, description="Largest norm of all gradients together; null: no limit.")
    fused: Annotated[bool, HOW] = Field(default=True, description="Whether AdamW updates all parameters in one kernel.")
    lr_factors: bool = Field(
        default=True, description="Whether the factors that a topology puts on learning rates of its own count."
    )


class ScheduleConfig(Section):
    """The learning rate over the steps, as a share of its peak."""

    kind: Literal["cosine", "wsd", "constant"] = Field(
        default="cosine",
        description="cosine; wsd: warm-up, stable, linear decay; constant. All after the warm-up.",
    )
    warmup: int = Field(default=0, ge=0, description="Steps in which the rate rises linearly from 0 to its peak.")
    warmup_epochs: float | None = Field(
        default=None, ge=0, description="The same in passes over the data, where training is counted in epochs."
    )
    final: float = Field(default=0.1, ge=0, le=1, description="Share of the peak at the last step (cosine, wsd).")
    decay: float = Field(default=0.2, gt=0, le=1, description="Share of all steps in which wsd decays, at the end.")


class StepsConfig(Section):
    """How long and in what form training runs."""

    steps: int | None = Field(
        default=None, ge=1, le=LARGEST_STEPS, description="Optimiser steps; give these, tokens or epochs."
    )
    tokens: int | None = Field(
        default=None, ge=1, description="Tokens to train on, rounded up to whole steps; give these, steps or epochs."
    )
    epochs: float | None = Field(
        default=None, gt=0, le=10**6, description="Passes over the training data, in whole steps; or steps or tokens."
    )
    batch_size: int = Field(ge=1, le=LARGEST_BATCH, description="Samples per step, of all processes together.")
    micro_batch_size: Annotated[BatchCount | Literal["auto"] | None, HOW] = Field(
        default=None,
        description="Samples that a process computes at a time, at most; its share of the batch is accumulated. "
        "auto: as many as fit into memory by estimate; null: its whole share.",
    )
    precision: Literal["fp32", "bf16", "fp16"] = Field(
        default="fp32", description="Precision of matrix products; weights and optimiser stay in fp32."
    )
    tf32: bool = Field(
        default=True,
        description="Whether what is left of fp32 matrix products runs in TF32 (10 bits of mantissa instead of 23), "
        "on GPUs that have it.",
    )
    compile: Annotated[bool | None, HOW] = Field(
        default=None,
        description="Whether blocks go through torch.compile; null: where it pays, on GPUs and in runs of 2000 steps "
        "or more on CPUs with a C++ compiler.",
    )
    activation_checkpointing: Annotated[Literal["none", "full", "sublayer", "selective"], HOW] = Field(
        default="none",
        description="What backward computes again instead of keeping: nothing, whole blocks, the inside of sublayers, "
        "or all but matrix products and attention.",
    )
    checkpointed_every: Annotated[int, HOW] = Field(
        default=1, ge=1, le=4096, description="Of so many blocks, one is computed again; the others keep everything."
    )
    ema: float | None = Field(
        default=None, gt=0, lt=1, description="Decay of averaged weights, which are then evaluated and exported."
    )
    ema_warmup: bool = Field(
        default=True,
        description="Whether that decay is at most s / (s + 9) at step s, so that first weights are soon forgotten; "
        "false: the same from the first step on.",
    )
    init_from: str | None = Field(
        default=None,
        min_length=1,
        description="Weights to begin with: run, Hugging Face folder, GGUF or safetensors file; null: first weights.",
    )
    init_model: bool = Field(
        default=False,
        description="Whether fields of the model are those of init_from, where an override does not name them.",
    )
    init_vocab: Literal["same", "resize"] = Field(
        default="same",
        description="same: init_from has the data's tokenizer and vocabulary; resize: rows of embedding and head are "
        "cut or added.",
    )
    parameters: str = Field(
        default="all",
        min_length=1,
        description="What is trained, the rest stays as it is: all; lora: factors beside matrices, see lora; residual: "
        "the topology's own links, gates and norms; norms; a pattern of names such as blocks.0.*; or several, as in "
        "lora+residual.",
    )
    seed: int = Field(default=0, ge=0, lt=2**63, description="Decides first weights, the order of data and dropout.")
    memory_check: Annotated[bool, HOW] = Field(
        default=True,
        description="Whether a run that would not fit into memory, as siamesenorm plan counts, is refused.",
    )

    @model_validator(mode="before")
    @classmethod
    def _read_accumulation(cls, values: Any) -> Any:
        """Runs and recipes of earlier versions say in how many parts a process computed its share of the batch."""
        if not isinstance(values, dict) or "accumulation" not in values:
            return values
        parts, rest = values["accumulation"], {k: v for k, v in values.items() if k != "accumulation"}
        if type(parts) is not int or parts < 1 or rest.get("micro_batch_size") is not None:
            raise ValueError(
                f"train.accumulation = {parts!r} is not allowed; it follows from train.micro_batch_size, "
                f"which takes the samples that a process computes at a time"
            )
        return rest if parts == 1 else {**rest, "micro_batch_size": "auto"}

    @model_validator(mode="after")
    def _check(self) -> StepsConfig:
        if sum(length is not None for length in (self.steps, self.tokens, self.epochs)) != 1:
            given = f"steps = {self.steps}, tokens = {self.tokens} and epochs = {self.epochs}"
            raise ValueError(f"{given} is not allowed; it takes one of the three")
        terms = [term.strip() for term in self.parameters.split("+")]
        if not all(terms) or len(set(terms)) < len(terms) or ("all" in terms and len(terms) > 1):
            raise FieldError.not_allowed(
                "parameters =", self.parameters, "all, or words and patterns with a + between them, each once"
            )
        if "lora" in terms and self.init_from is None:
            before = "factors change weights that were trained before"
            raise FieldError.refused("parameters =", self.parameters, before, "without init_from")
        return self


class LoraConfig(Section):
    """Factors of low rank that are trained in place of matrices, where train.parameters has lora."""

    rank: int = Field(default=8, ge=1, le=2**14, description="Rank of the change of a matrix, fused ones as a whole.")
    alpha: float = Field(default=16.0, gt=0, description="The change counts alpha / rank times.")
    targets: Names = Field(
        default=("qkv", "out", "up", "down"),
        min_length=1,
        description="Linear layers by their last name, or patterns of whole names such as blocks.0.attention.*.",
    )


class CheckpointConfig(Section):
    """What is saved while a run goes on."""

    every: int | None = Field(
        default=1000, ge=1, description="Steps between checkpoints; null: only at the end and when interrupted."
    )
    keep: int = Field(default=2, ge=1, description="How many of the newest checkpoints stay.")
    permanent: int | None = Field(
        default=None, ge=1, description="Steps between checkpoints that are never removed; null: there are none."
    )


class LoggingConfig(Section):
    """What is shown and recorded; metrics.jsonl always has every step."""

    every: int = Field(default=10, ge=1, description="Steps between lines on the screen and points in TensorBoard.")
    tensorboard: bool | None = Field(
        default=None, description="Whether to write TensorBoard files; null: if tensorboard is installed."
    )
    wandb: str | None = Field(default=None, min_length=1, description="Weights & Biases project to report to.")
    trackio: str | None = Field(default=None, min_length=1, description="trackio project to report to.")
    peak_flops: float | None = Field(
        default=None, gt=0, description="The device's FLOPs a second; null: known for GPUs, measured on a CPU."
    )


class ParallelConfig(Section):
    """How a model is spread over the processes that torchrun has started."""

    mode: Literal["none", "ddp", "fsdp", "hsdp", "tp"] = Field(
        default="ddp",
        description="ddp: copies; fsdp: shards; hsdp: shards within groups, copies between them; "
        "tp: matrices split, copies between groups. One process needs none of them.",
    )
    group: int | None = Field(
        default=None, ge=1, description="Processes in a sharding group (hsdp) or tensor group (tp); null: a node's."
    )
    sequence_parallel: bool | None = Field(
        default=None,
        description="Under tp, whether language models divide the streams between sublayers by tokens; null: where the "
        "group divides data.sequence_length.",
    )
    loss_parallel: bool | None = Field(
        default=None,
        description="Under tp, whether language models divide embedding, head and loss by the vocabulary; null: where "
        "every process of a group gets some of it.",
    )
    ep: int = Field(
        default=1,
        ge=1,
        description="Processes that experts are divided among, with fsdp, hsdp or tp; tokens travel by all-to-all.",
    )
    pp: int = Field(
        default=1,
        ge=1,
        description="Groups of processes that a pipeline has, each with some of the blocks; mode spreads what a group "
        "has. train.micro_batch_size decides the number of its micro-batches.",
    )
    schedule: Literal["1f1b", "gpipe", "interleaved_1f1b"] = Field(
        default="1f1b", description="Order of a pipeline's work, as torch.distributed.pipelining has it."
    )
    stages: int = Field(
        default=2, ge=2, le=64, description="Stages that a process has under interleaved_1f1b; under the others, one."
    )
    device: Literal["auto", "cpu", "cuda"] = Field(default="auto", description="Where to train; auto: a GPU if any.")
    timeout: float = Field(default=600.0, gt=0, description="Seconds after which a silent process is given up.")

    @model_validator(mode="after")
    def _check(self) -> ParallelConfig:
        for name in ("sequence_parallel", "loss_parallel"):
            if getattr(self, name) and self.mode != "tp":
                raise ValueError(f"{name} = true is not allowed with mode = {self.mode}; it takes mode = tp")
        return self


class DivergenceConfig(Section):
    """When a run counts as diverged, and what is done then."""

    policy: Literal["stop", "skip", "rollback"] = Field(
        default="stop",
        description="stop: end as diverged; skip: leave out the step; rollback: go back to the last checkpoint and "
        "on with other data.",
    )
    spike: float | None = Field(
        default=2.0, gt=0, description="Nats above the recent median at which a loss is a spike; null: none is."
    )
    spike_steps: int = Field(
        default=5, ge=1, description="Spikes in a row after which stop and rollback act; skip acts at the first."
    )
    history: int = Field(
        default=50, ge=2, le=100_000, description="Steps that medians are taken over; plateaus over four times as many."
    )
    plateau: float | None = Field(
        default=0.1,
        ge=0,
        description="How far below the loss of having learnt nothing of the input (of tokens or classes, how frequent "
        "each is; of noise, its variance); a run that stays above after its warm-up and no longer learns is at a "
        "plateau; null: not looked for.",
    )
    attempts: int = Field(default=10, ge=1, description="Skipped steps in a row, or rollbacks, after which it stops.")


class RunConfig(Section):
    """A whole run. The task's class narrows ``model``, ``data`` and ``evaluation``."""

    about: Annotated[str, HOW] = Field(default="", description="What this run is, in a few words.")
    task: str = Field(description="What is learnt.")
    model: SerializeAsAny[BaseModel] = Field(description="The model's shape.")
    data: SerializeAsAny[BaseModel] = Field(description="What is trained on.")
    optimizer: OptimizerConfig = Field(description="AdamW or Muon, and what happens to gradients before it.")
    schedule: ScheduleConfig = Field(default=ScheduleConfig(), description="The learning rate over the steps.")
    train: StepsConfig = Field(description="How long and in what form training runs.")
    lora: LoraConfig = Field(default=LoraConfig(), description="Factors that are trained in place of matrices.")
    checkpoint: Annotated[CheckpointConfig, HOW] = Field(
        default=CheckpointConfig(), description="What is saved during the run."
    )
    evaluation: Annotated[SerializeAsAny[BaseModel], HOW] = Field(description="What is measured on held-out data.")
    logging: Annotated[LoggingConfig, HOW] = Field(default=LoggingConfig(), description="What is shown and recorded.")
    parallel: Annotated[ParallelConfig, HOW] = Field(
        default=ParallelConfig(), description="How processes share the work."
    )
    divergence: Annotated[DivergenceConfig, HOW] = Field(
        default=DivergenceConfig(), description="When a run counts as diverged."
    )
    _notes: tuple[str, ...] = PrivateAttr(default=())

    @property
    def notes(self) -> tuple[str, ...]:
        """What was changed in a recipe without being asked for, in words."""
        return self._notes

    @model_validator(mode="after")
    def _check_steps(self) -> RunConfig:
        if self.schedule.warmup_epochs is not None and (self.train.epochs is None or self.schedule.warmup):
            raise ValueError(
                f"schedule.warmup_epochs = {self.schedule.warmup_epochs:g} is not allowed; "
                f"it takes null unless train.epochs is given and schedule.warmup = 0"
            )
        if self.train.epochs is not None:
            return self  # how many steps these are is known when the data are
        if self.schedule.warmup > self.steps:
            raise FieldError.not_allowed("schedule.warmup =", self.schedule.warmup, f"0 to all {self.steps} steps")
        if self.steps > LARGEST_STEPS:
            raise FieldError.not_allowed("train.tokens =", self.train.tokens, f"up to {LARGEST_STEPS} steps' worth")
        return self

    @property
    def sample_tokens(self) -> int:
        """Tokens of one sequence, or 1 for tasks whose samples are not made of tokens."""
        return int(getattr(self.data, "sequence_length", 1))

    @property
    def steps(self) -> int:
        """Optimiser steps of the whole run, resolved."""
        if self.train.steps is not None:
            return self.train.steps
        if self.train.tokens is None:
            raise ValueError("train.epochs: has no number of steps before the data are open; see in_steps")
        return math.ceil(self.train.tokens / (self.train.batch_size * self.sample_tokens))

    def in_steps(self, epoch_samples: int | None) -> RunConfig:
        """The same run with its epochs counted in steps, of which one in epoch_samples / batch_size is an epoch."""
        if self.train.epochs is None:
            return self
        if epoch_samples is None:
            raise ValueError(
                f"train.epochs = {self.train.epochs:g} is not allowed for these data, which have no epochs; "
                f"it takes train.steps instead"
            )
        whole = max(1, epoch_samples // self.train.batch_size)
        values = self.as_dict()
        values["train"] |= {"steps": max(1, round(self.train.epochs * whole)), "epochs": None}
        if self.schedule.warmup_epochs is not None:
            values["schedule"] |= {"warmup": round(self.schedule.warmup_epochs * whole), "warmup_epochs": None}
        return type(self).model_validate(values, strict=True)

    def as_dict(self) -> dict[str, Any]:
        """Plain data, every field resolved; `parse_config` gives the same configuration again."""
        return self.model_dump(mode="json")

    def decisive(self) -> dict[str, Any]:
        """What decides the losses, a task's own sections included: all but the fields marked as `HOW`."""
        return _decisive(self)


def _decisive(section: BaseModel) -> dict[str, Any]:
    values: dict[str, Any] = section.model_dump(mode="json")
    for name, info in type(section).model_fields.items():
        inner = getattr(section, name)
        if any(isinstance(mark, HowComputed) for mark in info.metadata):
            del values[name]
        elif isinstance(inner, BaseModel):
            values[name] = _decisive(inner)
    return values
