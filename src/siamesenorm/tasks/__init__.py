"""What is learnt: one file per domain, each with its loss, metrics and evaluation; the training engine is one for all.

from siamesenorm.tasks import find_task
find_task("language").sections["model"]          # the class of a recipe's model section
"""

from __future__ import annotations

from siamesenorm.tasks.base import Task
from siamesenorm.tasks.classification import ClassificationTask
from siamesenorm.tasks.diffusion.task import DiffusionTask
from siamesenorm.tasks.language import LanguageTask
from siamesenorm.tasks.own import OwnLanguageTask, OwnTask

TASKS: dict[str, type[Task]] = {task.name: task for task in (LanguageTask, ClassificationTask, DiffusionTask)}

OWN: dict[str, type[Task]] = {task.name: task for task in (OwnTask, OwnLanguageTask)}
"""Of models that are made by code of others: no recipe names them."""


def find_task(name: str) -> type[Task]:
    """The class of a name."""
    found = {**TASKS, **OWN}.get(name)
    if found is None:
        raise ValueError(f"{name!r} is not known; it takes one of {', '.join(TASKS)}")
    return found


__all__ = ["OWN", "TASKS", "Task", "find_task"]
