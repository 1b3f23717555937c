"""Evaluations: a run on all its held-out data, a language model on tasks of the harness and on texts."""

from __future__ import annotations

import contextlib
import json
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from siamesenorm.data.reading import read_text
from siamesenorm.errors import InteropError
from siamesenorm.interop import folder_harness as harness
from siamesenorm.interop.folder_harness import HarnessModel, TaskScore
from siamesenorm.interop.perplexity import TextScore, check_stride, score_text
from siamesenorm.opening import is_run
from siamesenorm.tasks import find_task
from siamesenorm.tasks.classification import ClassificationTask
from siamesenorm.tasks.confusion import Confusion
from siamesenorm.tasks.harness import resolve_tasks
from siamesenorm.terminal import progress_bar
from siamesenorm.train.facts import warn_of_changed_data
from siamesenorm.train.folder import plain_numbers
from siamesenorm.train.inference import Inference
from siamesenorm.train.provenance import command
from siamesenorm.train.trained import Stored, open_language_model, open_stored, open_trained

PERPLEXITIES = ("bits_per_byte", "byte_perplexity", "token_perplexity", "word_perplexity", "nats_per_token")


@dataclass(frozen=True)
class RunEvaluation:
    """What a run's own evaluation found."""

    metrics: dict[str, float]
    sizes: dict[str, int]
    """How many tokens, images, … are held out."""
    confusion: Confusion | None
    facts: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Everything, for a file."""
        found = {**self.facts, "metrics": plain_numbers(self.metrics), "held_out": self.sizes}
        if self.confusion is not None:
            found |= {"classes": self.confusion.as_dict(), "confusion": self.confusion.counts.astype(int).tolist()}
        return found


def evaluate_run(run: Path, place: Inference, spread: bool = False) -> RunEvaluation:
    """Measure the model of a run as the run itself does. spread: each process holds a part of the model only."""
    trained = open_stored(run) if spread and place.world.size > 1 else open_trained(run)
    task = find_task(trained.config.task).for_evaluation(trained.config)
    model = place.spread(trained) if isinstance(trained, Stored) else place.ready(trained.model)
    world = place.world
    if world.is_main:
        warn_of_changed_data(run, trained.config)
    with torch.no_grad(), place.autocast():
        metrics = task.evaluate(model, world.ranks(final=True))
    confusion = task.confusion if isinstance(task, ClassificationTask) else None
    settings = {"device": str(place.device), "precision": place.precision, "processes": world.size}
    facts = {"command": command(), "run": str(run), "step": trained.step, "settings": settings}
    return RunEvaluation(metrics, task.held_out_sizes(), confusion, facts)


@dataclass(frozen=True)
class LanguageEvaluation:
    """What tasks and texts say of a language model."""

    scores: list[TaskScore]
    texts: list[tuple[Path, TextScore]]
    facts: dict[str, Any]

    def as_json(self) -> dict[str, Any]:
        """Everything, for a file."""
        found = {
            **self.facts,
            "tasks": {score.task: vars(score) for score in self.scores},
            "texts": {str(path): text_json(score) for path, score in self.texts},
        }
        return json.loads(json.dumps(found, default=str))


def evaluate_language(
    checkpoint: Path,
    place: Inference,
    *,
    tasks: Sequence[str] = (),
    texts: Sequence[Path] = (),
    limit: int | None = None,
    batch_size: int = 8,
    window: int | None = None,
    stride: int | None = None,
    dtype: str = "auto",
    trust_remote_code: bool = False,
    console: Console | None = None,
) -> LanguageEvaluation:
    """Score a run's or a folder's language model; progress goes to the console."""
    harness.require_eval(tasks=bool(tasks))
    names = resolve_tasks(list(tasks))
    contents = [(path, _content(path)) for path in texts]
    started = time.time()
    loaded = load_language(checkpoint, place.device, dtype, trust_remote_code)
    length = min(window or loaded.max_length, loaded.max_length)
    stride = check_stride(length, stride)
    bars, measured = console or Console(quiet=True), []
    with place.autocast():
        scores = _scored_tasks(loaded, names, limit, batch_size, place) if names else []
        for path, content in contents:
            with progress_bar(bars, f"{path.name}, windows") as progress:
                score = score_text(
                    loaded.model,
                    loaded.tokenizer,
                    content,
                    window=length,
                    stride=stride,
                    batch_size=batch_size,
                    progress=progress,
                    sharing=place.sharing,
                )
            measured.append((path, score))
    settings = {
        "limit": limit,
        "batch_size": batch_size,
        "window": length,
        "stride": stride,
        "device": str(loaded.model.device),
        "dtype": str(loaded.model.dtype).removeprefix("torch."),
        "precision": place.precision,
        "processes": place.world.size,
    }
    facts = {
        "command": command(),
        "checkpoint": str(checkpoint),
        "versions": harness.versions(),
        "settings": settings,
        "config": loaded.model.config.to_dict(),
        "parameters": sum(parameter.numel() for parameter in loaded.model.parameters()),
        "seconds": round(time.time() - started, 3),
    }
    return LanguageEvaluation(scores, measured, facts)


def _scored_tasks(
    loaded: HarnessModel, names: list[str], limit: int | None, batch_size: int, place: Inference
) -> list[TaskScore]:
    """The harness' figures; the bars that it draws are the main process's."""
    with contextlib.ExitStack() as stack:
        if not place.is_main:
            stack.enter_context(contextlib.redirect_stderr(stack.enter_context(open(os.devnull, "w"))))
        return harness.run_tasks(loaded, names, limit=limit, batch_size=batch_size, sharing=place.sharing)


def load_language(checkpoint: Path, device: torch.device, dtype: str, trust_remote_code: bool = False) -> HarnessModel:
    """The model of a run or folder as the harness takes it; a run need not be exported first."""
    if not is_run(checkpoint):
        return harness.load_checkpoint(checkpoint, device=device, dtype=dtype, trust_remote_code=trust_remote_code)
    from siamesenorm.interop.huggingface import from_language_model
    from siamesenorm.interop.huggingface.tokenizer import for_transformers

    trained = open_language_model(checkpoint)
    limit, size = trained.model.config.max_length, trained.model.config.vocab_size
    model = from_language_model(trained.model).to(device, None if dtype == "auto" else getattr(torch, dtype))
    return HarnessModel(model, for_transformers(trained.tokenizer, size), limit)


def _content(path: Path) -> str:
    """A file's text, or one sentence about why there is none."""
    content = read_text(path, "text")
    if not content:
        raise InteropError(f"text: {str(path)!r} is empty")
    return content


def text_json(score: TextScore) -> dict[str, Any]:
    """A text's figures and what they were made of; JSON has no infinity."""
    found = {**vars(score), **{name: getattr(score, name) for name in PERPLEXITIES}}
    return {name: value if value is None or math.isfinite(value) else None for name, value in found.items()}
