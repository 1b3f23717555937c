"""The weights of a run where they lie, read a tensor at a time: of its exported file, or of its newest checkpoint.

A model that is larger than this machine's memory can so be exported: no process ever holds more than one matrix.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_shards

from siamesenorm.data.atomic import whole_file
from siamesenorm.data.tensor_files import Kind, LazyTensors, write_tensors
from siamesenorm.data.tensors import read_tensor, tensor_kinds
from siamesenorm.errors import ConfigError, DataError
from siamesenorm.layers.lora import Merging, merged, mergings
from siamesenorm.models.stack import current_name
from siamesenorm.tasks import find_task
from siamesenorm.train.checkpoint import Checkpoint, CheckpointStore
from siamesenorm.train.config import RunConfig
from siamesenorm.train.folder import CHECKPOINTS, WEIGHTS, RunFolder
from siamesenorm.train.parameters import choose_parameters, has_lora
from siamesenorm.train.sharded_files import ShardReader
from siamesenorm.train.training_state import AVERAGED
from siamesenorm.train.weights import check_weights


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
    run = RunFolder(folder)
    config = run.config()
    if task is not None and config.task != task:
        raise ConfigError(f"run: {str(folder)!r} is a run of {config.task}; it takes one of {task}")
    with torch.device("meta"):
        model = find_task(config.task).model_of(config)
    if run.has_weights:
        check_weights(run)
        step, weights = int(run.status().get("step") or config.steps), _of_file(run.path / WEIGHTS)
    else:
        checkpoint = newest(run, config)
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


def newest(run: RunFolder, config: RunConfig) -> Checkpoint:
    """The newest complete checkpoint of a run."""
    there = (run.path / CHECKPOINTS).is_dir()
    checkpoint = CheckpointStore(run.path / CHECKPOINTS, config.checkpoint.keep).latest() if there else None
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
    from safetensors import SafetensorError, safe_open

    try:
        with safe_open(file, framework="pt") as opened:
            return {"task", "config", "step"} <= (opened.metadata() or {}).keys()
    except (SafetensorError, OSError):
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
    places = {name: place for name, place in shards.weights().items() if name not in factors}
    places = {**places, **{name: place for name, place in shards.averages().items() if name in places}}
    learnt = {**shards.weights(), **shards.averages()}

    def read(name: str) -> Tensor:
        if (pair := pairs.get(name)) is None:
            return shards.read(places[name])
        parts = {each: shards.read(learnt[each]) for each in (pair.weight, pair.a, pair.b)}
        return merged(parts, iter([pair]))[name]

    return LazyTensors({name: shards.kind(place) for name, place in places.items()}, read)


class _Shards:
    """The tensors of a checkpoint by the names that it has for them."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.metadata = ShardReader(folder).read_metadata()

    def weights(self) -> Mapping[str, str]:
        """The model's, by name."""
        return self._named("model/")

    def averages(self) -> Mapping[str, str]:
        """Averaged ones."""
        return self._named(f"tensors/{AVERAGED}")

    def _named(self, prefix: str) -> dict[str, str]:
        stored = self.metadata.state_dict_metadata
        return {current_name(place.removeprefix(prefix)): place for place in stored if place.startswith(prefix)}

    def kind(self, place: str) -> Kind:
        """What a tensor is."""
        stored = self.metadata.state_dict_metadata[place]
        assert isinstance(stored, TensorStorageMetadata)
        return Kind(stored.properties.dtype, tuple(stored.size))

    def read(self, place: str) -> Tensor:
        """One tensor, from however many pieces."""
        kind = self.kind(place)
        tensor = torch.empty(kind.shape, dtype=kind.dtype)
        reader = _Known(self.folder, self.metadata)
        try:
            planner = DefaultLoadPlanner(flatten_state_dict=False)
            load_shards({place: tensor}, storage_reader=reader, planner=planner, no_dist=True)
        except Exception as error:  # DCP gathers whatever went wrong in an exception of its own
            raise DataError(f"run: {place} of {str(self.folder)!r} cannot be read: {error}") from None
        return tensor


class _Known(ShardReader):
    """A reader that has read the index already."""

    def __init__(self, folder: Path, metadata: Metadata) -> None:
        super().__init__(folder)
        self.known = metadata

    def read_metadata(self, *args: object, **kwargs: object) -> Metadata:
        """As it was read."""
        return self.known
