"""The model of a run, finished or not, as it is used afterwards: in memory, or its weights where they lie.

`open_trained` gives the model itself. `open_stored` reads a tensor when it is asked for, of the exported file or of
the newest checkpoint, so that a model larger than this machine's memory can be exported or spread over processes.
"""

from __future__ import annotations

import copy
import json
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_shards

from siamesenorm.data.atomic import whole_file
from siamesenorm.data.tensor_files import Kind, LazyTensors, write_tensors
from siamesenorm.data.tensors import read_header, read_tensor, read_tensors, tensor_kinds
from siamesenorm.data.tokenizer import FILE, Tokenizer
from siamesenorm.errors import ConfigError, DataError
from siamesenorm.layers.lora import Merging, merged, mergings
from siamesenorm.models.lm import LanguageModel
from siamesenorm.models.stack import current_name
from siamesenorm.tasks import distillation, find_task
from siamesenorm.tasks.corpora import load_saved_tokenizer, tokenizer_of
from siamesenorm.train.checkpoint.shards import ShardReader
from siamesenorm.train.checkpoint.state import AVERAGED
from siamesenorm.train.checkpoint.store import Checkpoint, CheckpointStore
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
    saved = (folder / FILE).is_file()
    return load_saved_tokenizer(folder) if saved else tokenizer_of(config.data)  # type: ignore[arg-type]


def _load_checkpoint(model: nn.Module, config: RunConfig, run: RunFolder) -> int:
    checkpoint = newest_checkpoint(run)
    as_trained = copy.deepcopy(model) if has_lora(config) else model
    choose_parameters(as_trained, config)
    if any(tensor.is_meta for tensor in as_trained.state_dict().values()):
        as_trained.to_empty(device="cpu")
    averaged: dict[str, Tensor] = {}
    if config.train.ema is not None:
        learnt = ((name, tensor) for name, tensor in as_trained.named_parameters() if tensor.requires_grad)
        averaged = {AVERAGED + name: torch.empty_like(tensor) for name, tensor in learnt}
    CheckpointStore(run.path / CHECKPOINTS, keep=1).load(checkpoint, {"model": as_trained, "tensors": averaged})
    with torch.no_grad():
        for name, parameter in as_trained.named_parameters():
            if AVERAGED + name in averaged:
                parameter.copy_(averaged[AVERAGED + name])
    if as_trained is not model:
        model.load_state_dict(merged(as_trained.state_dict(), mergings(as_trained)), assign=True)
    return checkpoint.step


@dataclass(frozen=True)
class Stored:
    """A run's model without memory, and its weights on the disk."""

    model: nn.Module
    config: RunConfig
    step: int
    folder: Path
    weights: LazyTensors


def open_stored(folder: Path | str, task: str | None = None) -> Stored:
    """What `open_trained` opens, without reading a weight."""
    run, config = RunFolder(folder), check_task(folder, task)
    with torch.device("meta"):
        model = find_task(config.task).model_of(config)
    if run.has_weights:
        check_weights(run)
        step, weights = int(run.status().get("step") or config.steps), _of_file(run.path / WEIGHTS)
    else:
        checkpoint = newest_checkpoint(run)
        step, weights = checkpoint.step, _of_checkpoint(checkpoint, config)
    expected = {name: tuple(tensor.shape) for name, tensor in model.state_dict().items()}
    found = {name: kind.shape for name, kind in weights.kinds.items()}
    for name in sorted(expected.keys() | found.keys()):
        if expected.get(name) != found.get(name):
            raise ConfigError(
                f"run: {name} is {found.get(name, 'missing')} in the weights of {str(folder)!r}; "
                f"its configuration says {expected.get(name, 'nothing of it')}"
            )
    return Stored(model, config, step, run.path, weights.only(expected))


def newest_checkpoint(run: RunFolder) -> Checkpoint:
    """The newest complete checkpoint of a run."""
    there = (run.path / CHECKPOINTS).is_dir()
    checkpoint = CheckpointStore(run.path / CHECKPOINTS, keep=1).latest() if there else None
    if checkpoint is None:
        raise ConfigError(f"run: {str(run.path)!r} has neither {WEIGHTS} nor a complete checkpoint yet")
    return checkpoint


def save_stored(stored: Stored, file: Path, dtype: torch.dtype | None = None) -> None:
    """Weights in one safetensors file, with what the model is and what it needs beside them in its header."""
    metadata = {
        "format": "pt",
        "task": stored.config.task,
        "config": json.dumps(stored.config.model.model_dump(mode="json")),
        "step": str(stored.step),
        **find_task(stored.config.task).header(stored.config, stored.folder),
    }
    with whole_file(file) as out:
        write_tensors(out, stored.weights.to(dtype), metadata)


def is_export(file: Path) -> bool:
    """Whether a file was written by `save_stored`."""
    try:
        return {"task", "config", "step"} <= read_header(file, "run").keys()
    except DataError:
        return False


def _of_file(file: Path) -> LazyTensors:
    kinds = tensor_kinds(file, "run")
    names = {current_name(name): name for name in kinds}
    return LazyTensors(
        {name: kinds[old] for name, old in names.items()}, lambda name: read_tensor(file, names[name], "run")
    )


def _of_checkpoint(checkpoint: Checkpoint, config: RunConfig) -> LazyTensors:
    """Averaged weights where there are any; factors of LoRA are merged into their matrices as these are read."""
    shards = _Shards(checkpoint.folder)
    pairs: dict[str, Merging] = {}
    if has_lora(config):
        with torch.device("meta"):
            as_trained = find_task(config.task).model_of(config)
        choose_parameters(as_trained, config)
        pairs = {pair.weight: pair for pair in mergings(as_trained)}
    factors = {name for pair in pairs.values() for name in (pair.a, pair.b)}
    weights = shards.named("model/")
    learnt = {**weights, **shards.named(f"tensors/{AVERAGED}")}
    kinds = {name: shards.kind(learnt[name]) for name in weights if name not in factors}

    def read(name: str) -> Tensor:
        if (pair := pairs.get(name)) is None:
            return shards.read(learnt[name])
        parts = {each: shards.read(learnt[each]) for each in (pair.weight, pair.a, pair.b)}
        return merged(parts, iter([pair]))[name]

    return LazyTensors(kinds, read)


class _Shards:
    """The tensors of a checkpoint by the names that it has for them."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.reader = folder, ShardReader(folder)

    def named(self, prefix: str) -> dict[str, str]:
        """Names of the tensors below a prefix, as they are now, each with its name in the checkpoint."""
        stored = self.reader.metadata.state_dict_metadata
        return {current_name(place.removeprefix(prefix)): place for place in stored if place.startswith(prefix)}

    def kind(self, place: str) -> Kind:
        """What a tensor is."""
        stored = self.reader.metadata.state_dict_metadata[place]
        assert isinstance(stored, TensorStorageMetadata)
        return Kind(stored.properties.dtype, tuple(stored.size))

    def read(self, place: str) -> Tensor:
        """One tensor, from however many pieces."""
        kind = self.kind(place)
        tensor = torch.empty(kind.shape, dtype=kind.dtype)
        try:
            planner = DefaultLoadPlanner(flatten_state_dict=False)
            load_shards({place: tensor}, storage_reader=self.reader, planner=planner, no_dist=True)
        except Exception as error:  # DCP gathers whatever went wrong in an exception of its own
            raise DataError(f"run: {place} of {str(self.folder)!r} cannot be read: {error}") from None
        return tensor
