"""A run that goes on in another topology: the same function at its step, the same schedule, data and moments.

::

    live = open_live("runs/spiky", at=8000)
    grafted, carried = graft_exactly(live.model, "siamese")
    live.go_on_as(grafted, carried, "runs/calm")                  # then: siamesenorm train runs/calm

What the new model has of the old one keeps its moments, new parameters begin with none. The old run is only read.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from siamesenorm.errors import ConfigError
from siamesenorm.models.lm import LanguageModel
from siamesenorm.models.lm.blending import Carried
from siamesenorm.train.branching import checkpoint_at, new_run
from siamesenorm.train.checkpoint.manifest import CheckpointError
from siamesenorm.train.checkpoint.state import AVERAGED
from siamesenorm.train.checkpoint.store import Checkpoint, CheckpointStore
from siamesenorm.train.config import RunConfig
from siamesenorm.train.folder import RunFolder
from siamesenorm.train.optimizer import build_optimizer
from siamesenorm.train.parameters import choose_parameters, has_lora
from siamesenorm.train.progress import check_progress
from siamesenorm.train.recipes import parse_config


@dataclass(frozen=True)
class LiveRun:
    """A run of language as a checkpoint has it."""

    folder: RunFolder
    config: RunConfig
    step: int
    model: LanguageModel
    optimizer: torch.optim.Optimizer
    averaged: dict[str, Tensor]
    """Averaged weights, where the run has some, by the names of the parameters that it trains."""
    progress: dict[str, Any]

    def averaged_model(self) -> LanguageModel:
        """The model with its averaged weights."""
        model = copy.deepcopy(self.model)
        with torch.no_grad():
            for name, parameter in model.named_parameters():
                parameter.copy_(self.averaged.get(name, parameter))
        return model

    def go_on_as(
        self,
        model: LanguageModel,
        carried: Carried,
        target: Path | str,
        *,
        averaged: LanguageModel | None = None,
        beside: Mapping[str, str] | None = None,
    ) -> Path:
        """A new run folder in which `siamesenorm train` goes on from this step with another model.

        averaged: the other model with averaged weights, where this run has some. beside: other files, with their text.
        """
        place, values = Path(target), self.config.as_dict()
        values["model"] = model.config.model_dump(mode="json")
        config = parse_config(values)
        state = {"model": model, "optimizer": self._optimizer_of(model, config, carried), "progress": self.progress}
        if averaged is not None:
            state["tensors"] = {AVERAGED + name: p.detach() for name, p in averaged.named_parameters()}
        message = f"grafted from {self.folder} at step {self.step}, to {model.config.topology}"
        new_run("target", place, self.folder, self.step, config, "grafted", message, self._save(state), beside)
        return place

    def _save(self, state: dict[str, Any]) -> Callable[[Path], None]:
        def save(folder: Path) -> None:
            problems: list[str] = []
            if not CheckpointStore(folder, 1, report=problems.append).save(self.step, state, wait=True):
                raise CheckpointError(f"target: {problems[0]}")

        return save

    def _optimizer_of(self, model: LanguageModel, config: RunConfig, carried: Carried) -> torch.optim.Optimizer:
        """The new model's optimiser: moments of what goes on, none of what is new."""
        optimizer, source = build_optimizer(model, config.optimizer), dict(self.model.named_parameters())
        names = {parameter: name for name, parameter in model.named_parameters()}
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                then = carried.get(names[parameter])
                if then is not None:
                    state = self.optimizer.state.get(source[then], {})
                    optimizer.state[parameter] = {key: value.clone() for key, value in state.items()}
                else:
                    moments = ("momentum_buffer",) if group.get("muon") else ("exp_avg", "exp_avg_sq")
                    optimizer.state[parameter] = {key: torch.zeros_like(parameter) for key in moments}
                    if not group.get("muon"):
                        optimizer.state[parameter]["step"] = torch.zeros(())
        return optimizer


def open_live(run: Path | str, at: int | None = None) -> LiveRun:
    """A run of language at its newest checkpoint, or at that of a step; nothing of it is changed."""
    folder = RunFolder(run)
    config = folder.config()
    if config.task != "language":
        raise ConfigError(f"run: {str(run)!r} is a run of {config.task}; it takes one of language")
    if has_lora(config):
        raise ConfigError.refused("run", run, "factors of LoRA go on in no other topology; finished, it has none")
    path, manifest = checkpoint_at(folder, at)
    model = LanguageModel(config.model, seed=0)  # type: ignore[arg-type]  # the task was checked
    choose_parameters(model, config)
    optimizer = build_optimizer(model, config.optimizer)
    averaged: dict[str, Tensor] = {}
    if config.train.ema is not None:
        trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad)
        averaged = {AVERAGED + name: p.detach().clone() for name, p in trained}
    store = CheckpointStore(path.parent, config.checkpoint.keep)
    state = {"model": model, "optimizer": optimizer, "tensors": averaged}
    progress = store.load(Checkpoint(path, manifest), state)
    check_progress(progress, path)
    plain = {name.removeprefix(AVERAGED): tensor for name, tensor in averaged.items()}
    return LiveRun(folder, config, manifest.step, model.requires_grad_(True), optimizer, plain, progress)
