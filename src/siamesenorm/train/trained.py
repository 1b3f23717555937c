"""The model of a run, finished or not, as it is used afterwards."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from siamesenorm.data.atomic import whole_file
from siamesenorm.data.tokenizer import Tokenizer
from siamesenorm.models.lm import LanguageModel
from siamesenorm.models.lm_config import LMConfig
from siamesenorm.tasks.corpora import load_saved_tokenizer, tokenizer_of
from siamesenorm.train.checkpoint import CheckpointStore
from siamesenorm.train.config import RunConfig
from siamesenorm.train.errors import ConfigError
from siamesenorm.train.folder import CHECKPOINTS, WEIGHTS, RunFolder


@dataclass(frozen=True)
class TrainedLanguageModel:
    """What a run gives: its model in evaluation mode, its tokenizer, its configuration, the step it had reached."""

    model: LanguageModel
    tokenizer: Tokenizer
    config: RunConfig
    step: int


def open_language_model(folder: Path | str) -> TrainedLanguageModel:
    """The model of a run: its exported weights, or those of its newest complete checkpoint."""
    run = RunFolder(folder)
    config = run.config()
    if config.task != "language" or not isinstance(config.model, LMConfig):
        raise ConfigError(f"run: {str(folder)!r} is a run of {config.task}; it takes one of language")
    with torch.device("meta"):
        model = LanguageModel(config.model)
    if (run.path / WEIGHTS).is_file():
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            model.load_state_dict(load_file(run.path / WEIGHTS), assign=True)
        except (SafetensorError, RuntimeError, OSError) as error:
            reason = " ".join(str(error).split())[:200]
            raise ConfigError(f"run: {str(run.path / WEIGHTS)!r} cannot be read: {reason}") from None
        step = int(run.status().get("step") or config.steps)
    else:
        model.to_empty(device="cpu")
        step = _load_checkpoint(model, config, run)
    tokenizer = (
        load_saved_tokenizer(run.path) if (run.path / "tokenizer.json").is_file() else tokenizer_of(config.data)  # type: ignore[arg-type]  # the task was checked
    )
    return TrainedLanguageModel(model.requires_grad_(False).eval(), tokenizer, config, step)


def _load_checkpoint(model: LanguageModel, config: RunConfig, run: RunFolder) -> int:
    store = CheckpointStore(run.path / CHECKPOINTS, config.checkpoint.keep)
    checkpoint = store.latest() if (run.path / CHECKPOINTS).is_dir() else None
    if checkpoint is None:
        raise ConfigError(f"run: {str(run.path)!r} has neither {WEIGHTS} nor a complete checkpoint yet")
    averaged: dict[str, Tensor] = {}
    if config.train.ema is not None:
        averaged = {f"ema.{name}": torch.empty_like(tensor) for name, tensor in model.named_parameters()}
    store.load(checkpoint, {"model": model, "tensors": averaged})
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if f"ema.{name}" in averaged:
                parameter.copy_(averaged[f"ema.{name}"])
    return checkpoint.step


def save_language_model(trained: TrainedLanguageModel, file: Path) -> None:
    """Weights in one safetensors file, with the model's configuration in its header."""
    from safetensors.torch import save

    metadata: dict[str, Any] = {
        "format": "pt",
        "config": json.dumps(trained.config.model.model_dump(mode="json")),
        "step": str(trained.step),
    }
    tensors = {name: tensor.detach().contiguous() for name, tensor in trained.model.state_dict().items()}
    with whole_file(file) as out:
        out.write(save(tensors, metadata=metadata))
