"""Tasks of the lm-evaluation-harness (extra: eval) on a model that is being trained."""

from __future__ import annotations

import importlib
import importlib.util
from collections.abc import Sequence
from typing import Any

from torch import nn

from siamesenorm.data.tokenizer import Tokenizer
from siamesenorm.errors import DataError
from siamesenorm.models.lm import LanguageModel, generate
from siamesenorm.models.lm.generation import before, ends_with
from siamesenorm.tasks import harness_tasks
from siamesenorm.tasks.likelihood import likelihoods, score_rows
from siamesenorm.tasks.sharing import Sharing

SAMPLES = "samples"
"""The name under which a task's documents are counted."""
MOST_GENERATED = 256
"""Tokens of an answer, where a task does not say; the harness' own."""


def check_tasks(names: Sequence[str]) -> None:
    """Raise if the harness is not installed or does not know a task."""
    if importlib.util.find_spec("lm_eval") is None:
        raise DataError.missing_package("evaluation.lm_eval:", "lm_eval", "eval")
    try:
        harness_tasks.resolve_tasks(names)
    except ValueError as error:
        raise DataError(f"evaluation.lm_eval: {str(error).removeprefix('tasks: ')}") from None


def directions_of(names: Sequence[str]) -> dict[str, bool]:
    """Whether more is better, of every metric of tasks, which are loaded for it, as ``lm_eval/TASK/METRIC``."""
    try:
        found: dict[str, dict[str, bool]] = harness_tasks.task_directions(harness_tasks.resolve_tasks(names))
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
    adapter, wanted = make_adapter(api.LM, model, tokenizer, max_length, sharing), harness_tasks.resolve_tasks(names)
    answer = evaluator.simple_evaluate(model=adapter, tasks=wanted, task_manager=harness_tasks.task_manager(wanted))
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
            (made,) = generate(inner, [ids], max_new_tokens=most, stop_tokens=[tokenizer.eos_id], stop_when=ended)
            return before(tokenizer.decode(made), stops)

    return Adapter()
