"""A model's weights in one safetensors file, whatever it was sharded in; whether a run's are still what it wrote."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from siamesenorm.data.atomic import whole_file
from siamesenorm.layers.lora import merged, mergings
from siamesenorm.train.errors import ConfigError
from siamesenorm.train.folder import STATUS, WEIGHTS, RunFolder
from siamesenorm.train.layout import row_orders, unwrap, usual_rows, whole
from siamesenorm.train.manifest import Entry, check
from siamesenorm.train.pipeline import Pipeline
from siamesenorm.train.training_state import model_tensors

log = logging.getLogger("siamesenorm")
_told: set[Path] = set()


@torch.no_grad()
def gather_weights(
    model: nn.Module, tensors: Mapping[str, Tensor] | None = None, *, keep: bool = True
) -> dict[str, Tensor]:
    """Whole weights on the CPU under their plain names, rows in the usual order; one matrix at a time.

    Factors of LoRA are merged into their matrices.
    tensors: others under the same names, such as averaged weights, in place of the model's. Every process must
    call this where the model is sharded; those with ``keep=False`` help and get nothing.
    """
    orders = dict(row_orders(model))
    own = {**model_tensors(model), **(tensors or {})}
    gathered = {}
    for name in model.division.sizes if isinstance(model, Pipeline) else model_tensors(model):
        full = whole(own[name].detach()) if name in own else None
        if name in orders and full is not None:
            full = usual_rows(full, orders[name])
        if isinstance(model, Pipeline):
            full = model.everywhere(name, full)
        if keep and full is not None:
            gathered[name] = full.to("cpu", copy=True).contiguous()
    return merged(gathered, mergings(unwrap(model))) if keep else gathered


def export_weights(
    model: nn.Module, file: Path | str, tensors: Mapping[str, Tensor] | None = None, *, is_main: bool = True
) -> Entry | None:
    """Write weights as safetensors, whole or not at all; every process calls it, the main one writes.

    Returns what was written, by size and checksum; None in the other processes.
    """
    weights = gather_weights(model, tensors, keep=is_main)
    if not is_main:
        return None
    from safetensors.torch import save

    content = save(weights, metadata={"format": "pt"})
    with whole_file(Path(file)) as out:
        out.write(content)
    return Entry(len(content), hashlib.sha256(content).hexdigest())


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
        if run.path.resolve() not in _told:
            _told.add(run.path.resolve())
            log.warning("%s: carries no checksum of its weights, which are taken as they are", run.path)
        return
    try:
        damage = check(run.path, {WEIGHTS: Entry(int(recorded["size"]), str(recorded["sha256"]))})
    except (KeyError, TypeError, ValueError):
        damage = f"{run.path}: status.json has no checksum of {WEIGHTS} that can be read"
    if damage is not None:
        raise ConfigError(f"run: {damage}; bring back a sound copy, or train it again with --restart")
