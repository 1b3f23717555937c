"""lm-evaluation-harness on a causal LM in a folder, with its own tasks and those of `lm_eval_tasks`."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import logging
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from siamesenorm.errors import InteropError, check_torchvision
from siamesenorm.interop.foreign_folder import read_by_others, whole
from siamesenorm.tasks.harness import task_manager
from siamesenorm.tasks.sharing import Sharing

FEWSHOT_SEED = 1234  # the harness' own
PACKAGES = ("siamesenorm", "torch", "transformers", "lm-eval", "datasets", "tokenizers")


@dataclass
class HarnessModel:
    """A model, its tokenizer, and how long a sequence it takes."""

    model: Any
    tokenizer: Any
    max_length: int


@dataclass(frozen=True)
class TaskScore:
    """One task's figures."""

    task: str
    metrics: dict[str, float]
    stderr: dict[str, float]
    samples: int
    documents: int
    version: Any
    config: dict[str, Any] = field(default_factory=dict)


def require_eval(*, tasks: bool = True) -> None:
    """Raise one sentence where the extra is not installed; texts need no harness."""
    for module in ("transformers", "lm_eval") if tasks else ("transformers",):
        if importlib.util.find_spec(module) is None:
            name = module.replace("_", "-")
            raise InteropError.missing_package("evaluate", name, "eval")
    check_torchvision()  # transformers imports torchvision where it is installed
    if tasks:
        import lm_eval  # noqa: F401  # takes seconds


def load_checkpoint(
    folder: str | Path,
    *,
    device: torch.device | str = "cpu",
    dtype: str = "auto",
    trust_remote_code: bool = False,
) -> HarnessModel:
    """A causal LM and its tokenizer from a folder as `save_pretrained` and `export` write it."""
    import transformers

    import siamesenorm.interop.huggingface  # noqa: F401  # makes our models known

    path = Path(folder)
    if not (path / "config.json").is_file():
        raise InteropError(f"checkpoint: {str(folder)!r} is neither a run nor a folder with a config.json in it")
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "local_files_only": True}
    with read_by_others("checkpoint", path):
        tokenizer = transformers.AutoTokenizer.from_pretrained(path, **options)
        options |= {"dtype": dtype, "output_loading_info": True}
        model = whole(transformers.AutoModelForCausalLM.from_pretrained(path, **options))
        limit = int(getattr(model.config, "max_position_embeddings", None) or 2048)
    return HarnessModel(model.to(device).eval(), tokenizer, limit)


def run_tasks(
    loaded: HarnessModel,
    names: Sequence[str],
    *,
    limit: int | None = None,
    batch_size: int = 8,
    sharing: Sharing | None = None,
) -> list[TaskScore]:
    """The harness' figures for each task, in every process of those that share its requests."""
    from lm_eval import evaluate
    from lm_eval.models.huggingface import HFLM

    class SharedModel(HFLM):
        """Every process asks for all and computes its part; the harness itself knows of one process."""

        def loglikelihood(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
            return shared.split(requests, lambda mine: HFLM.loglikelihood(self, mine, disable_tqdm))

        def loglikelihood_rolling(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
            return shared.split(requests, lambda mine: HFLM.loglikelihood_rolling(self, mine, disable_tqdm))

        def generate_until(self, requests: list[Any], disable_tqdm: bool = False) -> list[Any]:
            return shared.split(requests, lambda mine: HFLM.generate_until(self, mine, disable_tqdm))

    shared = sharing or Sharing()

    for name in ("lm_eval", "lm_eval.api.task", "lm_eval.evaluator", "lm_eval.models.huggingface"):
        logging.getLogger(name).setLevel(logging.ERROR)
    model = SharedModel(
        pretrained=loaded.model,
        tokenizer=loaded.tokenizer,
        backend="causal",
        batch_size=batch_size,
        max_length=loaded.max_length,
        device=str(loaded.model.device),
    )
    tasks = task_manager(names).load(list(names))
    for task in tasks["tasks"].values():
        if task.get_config("num_fewshot") is None:
            task.set_config(key="num_fewshot", value=0)
        task.set_fewshot_seed(seed=FEWSHOT_SEED)
    found = evaluate(lm=model, task_dict=tasks, limit=limit, log_samples=False, bootstrap_iters=1000)
    assert found is not None  # only other ranks get nothing
    return [read_score(name, found) for name in found["results"] if name in found["n-samples"]]


def read_score(name: str, found: Any) -> TaskScore:
    """One task out of what the harness returns, whose keys are ``metric,filter``."""
    metrics: dict[str, float] = {}
    stderr: dict[str, float] = {}
    for key, value in found["results"][name].items():
        metric, comma, chosen = key.partition(",")
        if not comma or not isinstance(value, (int, float)):
            continue
        suffix = "" if chosen == "none" else f" ({chosen})"
        target = stderr if metric.endswith("_stderr") else metrics
        target[metric.removesuffix("_stderr") + suffix] = float(value)
    counts, config = found["n-samples"][name], found["configs"].get(name, {})
    kept = ("dataset_path", "dataset_name", "dataset_kwargs", "validation_split", "test_split", "num_fewshot")
    return TaskScore(
        task=name,
        metrics=metrics,
        stderr=stderr,
        samples=counts["effective"],
        documents=counts["original"],
        version=found["versions"].get(name),
        config={key: config[key] for key in kept if config.get(key) is not None},
    )


def versions() -> dict[str, str | None]:
    """Versions of what the figures depend on."""
    installed: dict[str, str | None] = {}
    for name in (*PACKAGES, "ai2-olmo"):
        try:
            installed[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            installed[name] = None
    return installed
