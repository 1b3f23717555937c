"""The model of a run, finished or not, as it is used afterwards."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from siamesenorm.data.tensors import read_tensors
from siamesenorm.data.tokenizer import Tokenizer
from siamesenorm.errors import ConfigError
from siamesenorm.layers.lora import merged, mergings
from siamesenorm.models.lm import LanguageModel
from siamesenorm.tasks import distillation, find_task
from siamesenorm.tasks.corpora import load_saved_tokenizer, tokenizer_of
from siamesenorm.train.checkpoint import CheckpointStore
from siamesenorm.train.config import RunConfig
from siamesenorm.train.folder import CHECKPOINTS, WEIGHTS, RunFolder
from siamesenorm.train.parameters import choose_parameters, has_lora
from siamesenorm.train.weights import check_weights


@dataclass(frozen=True)
class Trained:
    """What a run of any task gives: its model in evaluation mode, its configuration, the step it had reached."""

    model: nn.Module
    config: RunConfig
    step: int
    folder: Path


@dataclass(frozen=True)
class TrainedLanguageModel:
    """What a run of language gives: its model, its tokenizer, its configuration, the step it had reached."""

    model: LanguageModel
    tokenizer: Tokenizer
    config: RunConfig
    step: int


def check_task(folder: Path | str, task: str | None = None) -> RunConfig:
    """The configuration of a run, which must be of this task; None: any."""
    config = RunFolder(folder).config()
    if task is not None and config.task != task:
        raise ConfigError(f"run: {str(folder)!r} is a run of {config.task}; it takes one of {task}")
    return config


def open_trained(folder: Path | str, task: str | None = None) -> Trained:
    """The model of a run: its exported weights, or those of its newest complete checkpoint.

    task: what the run must be of; None: any.
    """
    run, config = RunFolder(folder), check_task(folder, task)
    model = _empty_model(config)
    if run.has_weights:
        check_weights(run)
        tensors, _ = read_tensors(run.path / WEIGHTS, "run")
        try:
            model.load_state_dict(tensors, assign=True)
        except RuntimeError as error:
            raise ConfigError.failed("run", run.path / WEIGHTS, "read", error) from None
        step = int(run.status().get("step") or config.steps)
    else:
        step = _load_checkpoint(model, config, run)
    return Trained(model.requires_grad_(False).eval(), config, step, run.path)


distillation.RUNS[:] = [lambda folder: open_trained(folder, "classification").model]


def _empty_model(config: RunConfig) -> nn.Module:
    """A model that waits for weights; on no device, unless it has constants that no file brings."""
    make = find_task(config.task).model_of
    with torch.device("meta"):
        model = make(config)
    saved = model.state_dict()
    return model if all(name in saved for name, _ in model.named_buffers()) else make(config)


def open_language_model(folder: Path | str) -> TrainedLanguageModel:
    """The model of a run of language, with its tokenizer."""
    trained = open_trained(folder, "language")
    assert isinstance(trained.model, LanguageModel)
    tokenizer = run_tokenizer(trained.folder, trained.config)
    return TrainedLanguageModel(trained.model, tokenizer, trained.config, trained.step)


def run_tokenizer(folder: Path, config: RunConfig) -> Tokenizer:
    """The tokenizer of a run of language."""
    saved = (folder / "tokenizer.json").is_file()
    return load_saved_tokenizer(folder) if saved else tokenizer_of(config.data)  # type: ignore[arg-type]


def _load_checkpoint(model: nn.Module, config: RunConfig, run: RunFolder) -> int:
    store = CheckpointStore(run.path / CHECKPOINTS, config.checkpoint.keep)
    checkpoint = store.latest() if (run.path / CHECKPOINTS).is_dir() else None
    if checkpoint is None:
        raise ConfigError(f"run: {str(run.path)!r} has neither {WEIGHTS} nor a complete checkpoint yet")
    as_trained = copy.deepcopy(model) if has_lora(config) else model
    choose_parameters(as_trained, config)
    if any(tensor.is_meta for tensor in as_trained.state_dict().values()):
        as_trained.to_empty(device="cpu")
    averaged: dict[str, Tensor] = {}
    if config.train.ema is not None:
        learnt = ((name, tensor) for name, tensor in as_trained.named_parameters() if tensor.requires_grad)
        averaged = {f"ema.{name}": torch.empty_like(tensor) for name, tensor in learnt}
    store.load(checkpoint, {"model": as_trained, "tensors": averaged})
    with torch.no_grad():
        for name, parameter in as_trained.named_parameters():
            if f"ema.{name}" in averaged:
                parameter.copy_(averaged[f"ema.{name}"])
    if as_trained is not model:
        model.load_state_dict(merged(as_trained.state_dict(), mergings(as_trained)), assign=True)
    return checkpoint.step
