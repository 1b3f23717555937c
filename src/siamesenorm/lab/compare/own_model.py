"""Users' own models in a grid: from a file of Python, the recipe that stands for them, what is asked beforehand.

A file, ``my_model.py:make_model``, is code that its user runs, named on the command line or in a call; nothing else
ever names one.
"""

from __future__ import annotations

import hashlib
import importlib.util
import math
import sys
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from siamesenorm.errors import ConfigError
from siamesenorm.tasks import OWN, find_task
from siamesenorm.tasks.own import Given, OwnLanguageTask, OwnTask, check_model, given_kind, name_of
from siamesenorm.tasks.own_data import FunctionSource, TokenSource, rows_of
from siamesenorm.train.distributed import World
from siamesenorm.train.engine import Engine
from siamesenorm.train.folder import METRICS, read_metrics

if TYPE_CHECKING:
    from siamesenorm.lab.compare.runner import CellProgress

ALLOWED = "it takes FILE.py:NAME, such as my_model.py:make_model"
STEPS, BATCH, LENGTH, LR = 300, 16, 128, 1e-3
"""What is trained where nothing is said."""
CORPUS = "python-docs"
"""What is learnt from where nothing is said."""
CLOSE = 1e-3
"""How far first losses of the same model lie apart, as a share: on another number of threads, or another machine."""


def open_model_file(text: str) -> Given:
    """The function of that name; and, where the file has them, its ``data``, ``validation`` and ``loss``."""
    place, _, name = text.rpartition(":")
    if not place or not name.isidentifier():
        raise ConfigError.refused("--model", text, ALLOWED)
    module = import_file(Path(place))
    function = getattr(module, name, None)
    if not callable(function):
        known = [n for n, v in vars(module).items() if callable(v) and getattr(v, "__module__", "") == module.__name__]
        there = "is no function" if hasattr(module, name) else "is not there"
        raise ConfigError(f"--model: {name!r} {there} in {place!r}; it takes one of {', '.join(known) or 'none'}")
    more = {part: getattr(module, part, None) for part in ("data", "validation", "loss")}
    if more["loss"] is not None and not callable(more["loss"]):
        raise ConfigError(f"--model: loss of {place!r} is no function; it takes loss(model, batch)")
    return Given(function, **more)


def import_file(file: Path) -> ModuleType:
    """A file as a module, once a process; what it imports from its own folder is found."""
    if not file.is_file():
        raise ConfigError(f"--model: {str(file)!r} is not a file; {ALLOWED}")
    path = file.resolve()
    name = f"{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    if name in sys.modules:
        return sys.modules[name]
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--model: {str(file)!r} is no file of Python; {ALLOWED}")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    sys.path.insert(0, str(path.parent))
    try:
        spec.loader.exec_module(module)
    except Exception as error:
        del sys.modules[name]
        raise ConfigError(f"--model: {str(file)!r} cannot be imported: {type(error).__name__}: {error}") from error
    finally:
        sys.path.remove(str(path.parent))
    return module


def own_recipe(
    parts: Given,
    source: str = "",
    *,
    steps: int | None = None,
    batch_size: int | None = None,
    sequence_length: int | None = None,
) -> dict[str, Any]:
    """The values of a recipe that trains a given model; its fields can be overridden as those of any other."""
    data: dict[str, Any] = {}
    named = parts.data is None or isinstance(parts.data, (str, Path))
    kind = "tokens" if named else given_kind(parts)
    if kind == "tokens":
        data["sequence_length"] = sequence_length or LENGTH
    if named:
        held_out = None if parts.validation is None else str(parts.validation)
        data |= {"train": CORPUS if parts.data is None else str(parts.data), "validation": held_out}
    elif kind == "tokens":
        data["sha256"] = TokenSource.of_array(parts.data, parts.validation, data["sequence_length"]).sha256
    elif kind == "function":  # which decides itself how large its batches are
        batch_size = rows_of(FunctionSource(parts.data, 1).batch(0, 0, 1))
    steps = STEPS if steps is None else steps
    return {
        "about": f"A model of {source or name_of(parts.make_model)}.",
        "task": (OwnLanguageTask if kind == "tokens" else OwnTask).name,
        "model": {"topology": "pre", "source": source or name_of(parts.make_model)},
        "data": data,
        "optimizer": {"lr": LR},
        "schedule": {"warmup": steps // 20},
        "train": {"steps": steps, "batch_size": BATCH if batch_size is None else batch_size, "compile": False},
        "evaluation": {"every": steps},
        "checkpoint": {"every": None},
        "logging": {"every": max(1, min(10, steps // 50)), "tensorboard": False},
    }


def check_own_models(places: Sequence[CellProgress]) -> None:
    """Raise where a model cannot be trained, or is not the one that has been trained here; models of ours pass."""
    own = [progress for progress in places if progress.cell.config.task in OWN]
    for cell in {progress.cell.topology: progress.cell for progress in own}.values():
        task = find_task(cell.config.task)(cell.config)
        assert isinstance(task, OwnTask)
        check_model(task)
    begun = {progress.cell.topology: progress for progress in own if (progress.folder / METRICS).is_file()}
    for progress in begun.values():
        _check_same(progress)


def _check_same(progress: CellProgress) -> None:
    """Raise if the first loss of a run is not what this model, these data and this loss give."""
    there = next((r["loss"] for r in read_metrics(progress.folder) if r["step"] == 1 and "loss" in r), None)
    if there is None:
        return
    config = progress.cell.config
    with (
        closing(World.start(config.parallel)) as world,
        closing(Engine(config, find_task(config.task)(config), world)) as engine,
    ):
        here = engine.compute(1).loss
    if not math.isclose(here, there, rel_tol=CLOSE, abs_tol=CLOSE**2):
        raise ConfigError(
            f"folder: {str(progress.folder.parent.parent)!r} holds runs of another model, data or loss, whose first "
            f"loss for {progress.cell.topology!r} is {there:.6g} instead of {here:.6g}; give another folder"
        )
