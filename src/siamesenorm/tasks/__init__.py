"""What is learnt: one file a domain, each with its loss, metrics and evaluation; the training engine is one for all.

from siamesenorm.tasks import find_task
find_task("language").sections["model"]          # the class of a recipe's model section
"""

from __future__ import annotations

from siamesenorm.tasks.base import Task
from siamesenorm.tasks.classification import ClassificationTask
from siamesenorm.tasks.diffusion.task import DiffusionTask
from siamesenorm.tasks.language import LanguageTask

TASKS: dict[str, type[Task]] = {task.name: task for task in (LanguageTask, ClassificationTask, DiffusionTask)}


def find_task(name: str) -> type[Task]:
    """The class of a name."""
    if name not in TASKS:
        raise ValueError(f"{name!r} is not known; it takes one of {', '.join(TASKS)}")
    return TASKS[name]


__all__ = ["TASKS", "Task", "find_task"]
