"""A model's weights in one safetensors file, whatever it was sharded in; whether a run's are still what it wrote."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, BinaryIO, cast

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from siamesenorm.data.atomic import whole_file
from siamesenorm.data.tensor_files import Kind, LazyTensors, file_order, write_tensors
from siamesenorm.errors import ConfigError
from siamesenorm.layers.lora import merged, mergings
from siamesenorm.train.checkpoint.manifest import ManifestEntry, check
from siamesenorm.train.checkpoint.state import model_tensors
from siamesenorm.train.folder import STATUS, WEIGHTS, RunFolder
from siamesenorm.train.parallel.pipeline import Pipeline
from siamesenorm.train.tensor_layout import row_orders, stored_rows, unwrap, whole

log = logging.getLogger("siamesenorm")
_warned: set[Path] = set()


@torch.no_grad()
def gather_weights(
    model: nn.Module, tensors: Mapping[str, Tensor] | None = None, *, keep: bool = True
) -> dict[str, Tensor]:
    """Whole weights on the CPU under their plain names, rows in the original order; one matrix at a time.

    Factors of LoRA are merged into their matrices.
    tensors: others under the same names, such as averaged weights, in place of the model's. Every process must
    call this where the model is sharded; those with ``keep=False`` help and get nothing.
    """
    weights, gathered = whole_weights(model, tensors), {}
    for name in weights.kinds:
        full = weights.read(name)
        if keep:
            gathered[name] = full.clone(memory_format=torch.contiguous_format)
    return gathered


def export_weights(
    model: nn.Module, file: Path | str, tensors: Mapping[str, Tensor] | None = None, *, is_main: bool = True
) -> ManifestEntry | None:
    """Write weights as safetensors, whole or not at all; every process calls it, the main one writes.

    Matrices are gathered and written one after the other: the main process never holds more than one of them.
    Returns what was written, by size and checksum; None in the other processes.
    """
    weights = whole_weights(model, tensors)
    left = file_order(weights.kinds)
    if not is_main:
        for name in left:
            weights.read(name)
        return None

    def read(name: str) -> Tensor:
        left.remove(name)
        return weights.read(name)

    try:
        with whole_file(Path(file)) as out:
            counted = _Counted(out)
            write_tensors(cast(BinaryIO, counted), replace(weights, read=read), {"format": "pt"})
    except Exception:
        for name in list(left):  # the others gather all of them, whatever became of the file
            weights.read(name)
        raise
    return ManifestEntry(size=counted.size, sha256=counted.digest.hexdigest())


@torch.no_grad()
def whole_weights(model: nn.Module, tensors: Mapping[str, Tensor] | None = None) -> LazyTensors:
    """What `gather_weights` gives, each when it is asked for: by all processes, in the same order."""
    orders, own = dict(row_orders(model)), model_tensors(model)
    found = {name: (tensors or {}).get(name, tensor).detach() for name, tensor in own.items()}
    pairs = {pair.weight: pair for pair in mergings(unwrap(model))}
    factors = {name for pair in pairs.values() for name in (pair.a, pair.b)}

    def gathered(name: str) -> Tensor:
        full = whole(found[name]) if name in found else None
        if name in orders and full is not None:
            full = stored_rows(full, orders[name])
        if isinstance(model, Pipeline):
            full = model.everywhere(name, full)
        assert full is not None
        return full.cpu()

    @torch.no_grad()
    def read(name: str) -> Tensor:
        if (pair := pairs.get(name)) is None:
            return gathered(name)
        return merged({each: gathered(each) for each in (pair.weight, pair.a, pair.b)}, iter([pair]))[name]

    kinds = {name: Kind(tensor.dtype, tuple(tensor.shape)) for name, tensor in found.items() if name not in factors}
    if isinstance(model, Pipeline):
        kinds = {name: Kind(dtype, tuple(shape)) for name, (shape, dtype) in model.division.sizes.items()}
    return LazyTensors(kinds, read)


class _Counted:
    """A file to write that knows how much was written, and its SHA-256."""

    def __init__(self, file: BinaryIO) -> None:
        self.file, self.size, self.digest = file, 0, hashlib.sha256()

    def write(self, content: bytes | memoryview) -> int:
        """Write, and count."""
        self.size += len(content)
        self.digest.update(content)
        return self.file.write(content)


def check_weights(run: RunFolder) -> None:
    """Raise if a run's exported weights are not those that it finished with, and that its figures are of.

    Runs of earlier versions have no checksum in their status.json: that is said, once.
    """
    status = run.readable_status()
    if status is None:
        raise ConfigError(
            f"run: {str(run.path / STATUS)!r}, which has the checksum of {WEIGHTS}, cannot be read; bring back a sound "
            f"copy, train it again with --restart, or write {{}} there to take the weights as they are"
        )
    recorded: Any = status.get("weights")
    if recorded is None:
        if run.path.resolve() not in _warned:
            _warned.add(run.path.resolve())
            log.warning("%s: carries no checksum of its weights, which are taken as they are", run.path)
        return
    try:
        damage = check(run.path, {WEIGHTS: ManifestEntry.model_validate(recorded)})
    except ValidationError:
        damage = f"{run.path}: status.json has no checksum of {WEIGHTS} that can be read"
    if damage is not None:
        raise ConfigError(f"run: {damage}; bring back a sound copy, or train it again with --restart")
