"""From a recipe and overrides to a checked configuration.

config = resolve("lm-tiny", ["topology=pre", "lr=3e-3"])
parse_config(config.as_dict()) == config

A recipe is a YAML file of the package (`recipe_names`) or a path. It may name another one as its ``base`` and say
only what differs.
"""

from __future__ import annotations

import copy
import copyreg
import functools
import json
from collections.abc import Collection, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import Field, ValidationError, create_model

from siamesenorm.data.reading import read_text, reason_of
from siamesenorm.errors import ConfigError, DataError, shown
from siamesenorm.tasks import OWN, TASKS, Task, find_task
from siamesenorm.tasks.base import HOW
from siamesenorm.train.config import RunConfig
from siamesenorm.train.fields import explain
from siamesenorm.train.overrides import apply_overrides
from siamesenorm.train.yaml import LARGEST, read_yaml

Recipe = str | Path | Mapping[str, Any]
"""A name, a file, or the values themselves."""
ENDING = ".yaml"
SMALL = ("-tiny", "-digits", "-fashion")
"""How names of recipes for a CPU end; of DeiT, tiny is one of the paper's sizes."""
LENGTHS = {"train.steps", "train.tokens", "train.epochs", "train.batch_size"}
OF_THE_RECIPE = {"data.train", "model.dim", "model.blocks", *LENGTHS}
"""Fields that a recipe's words are about."""
DEEPEST = 8
"""Recipes that may be based on one another."""


@functools.lru_cache
def recipe_names() -> tuple[str, ...]:
    """Recipes of the package, small ones last."""
    folder = resources.files("siamesenorm") / "recipes"
    found = [file.name.removesuffix(ENDING) for file in folder.iterdir() if file.name.endswith(ENDING)]
    return tuple(sorted(found, key=lambda name: (name.endswith(SMALL) and name != "deit-tiny", name)))


def resolve(recipe: str | Mapping[str, Any], overrides: Sequence[str] = ()) -> RunConfig:
    """The configuration of a recipe with ``key=value`` overrides."""
    values = load_recipe(recipe)
    kind = config_class(values.get("task"))
    merged = copy.deepcopy(values)
    named = apply_overrides(merged, overrides, kind)
    steps = merged.get("train")
    if isinstance(steps, dict) and steps.get("init_model") is True and not is_run(recipe):
        from siamesenorm.train.init_from import source_model  # which reads runs, whose configurations are read here

        merged = {**values, "model": source_model(steps.get("init_from"), str(merged["task"]))}
        apply_overrides(merged, overrides, kind)
    if OF_THE_RECIPE & named and "about" not in named:
        merged["about"] = ""  # what the recipe says of its corpus, size and time is not true of this run
    note = fit_warmup(merged, values, named)
    config = parse_config(merged)
    config._notes = (note,) if note else ()
    return config


def fit_warmup(merged: dict[str, Any], values: Mapping[str, Any], named: Collection[str]) -> str:
    """Shorten a warm-up that a recipe brings into fewer steps than it has itself; what was done, in words.

    named: fields that were given, which are taken as they are.
    """
    schedule, train, before = merged.get("schedule"), merged.get("train"), values.get("train")
    if not isinstance(schedule, dict) or not isinstance(train, dict) or not isinstance(before, dict):
        return ""
    warmup, steps, whole = schedule.get("warmup"), _steps_of(merged), before.get("steps")
    if not {"train.steps", "train.tokens"} & {*named} or "schedule.warmup" in named:
        return ""
    if type(warmup) is not int or type(steps) is not int:
        return ""  # which is refused
    if not 1 <= steps < warmup:
        return ""
    shorter = max(1, round(warmup * steps / whole)) if type(whole) is int and whole >= warmup else max(1, steps // 10)
    merged["schedule"] = {**schedule, "warmup": shorter}
    return f"schedule.warmup is {shorter} instead of the recipe's {warmup}, as there are {steps} steps"


def _steps_of(values: Mapping[str, Any]) -> Any:
    """Steps of values that are not checked yet, also where they are counted in tokens."""
    train, data = values["train"], values.get("data")
    tokens, batch = train.get("tokens"), train.get("batch_size")
    length = data.get("sequence_length", 1) if isinstance(data, dict) else 1
    if train.get("steps") is None and type(tokens) is type(batch) is type(length) is int and batch * length > 0:
        return -(-tokens // (batch * length))
    return train.get("steps")


def is_run(recipe: Recipe) -> bool:
    """Whether a recipe is what a run was begun with: its model is resolved already."""
    return not isinstance(recipe, Mapping) and str(recipe) not in recipe_names() and Path(recipe).is_dir()


def load_recipe(recipe: Recipe) -> dict[str, Any]:
    """A recipe's values, with those of its bases."""
    if isinstance(recipe, Mapping):
        return dict(recipe)
    values: dict[str, Any] = {}
    seen: list[str] = []
    name: str | Path | None = recipe
    while name is not None:
        if str(name) in seen or len(seen) >= DEEPEST:
            raise ConfigError.refused("base", name, "recipes are based on each other in a circle")
        seen.append(str(name))
        text, place = read_recipe(name)
        read = read_yaml(text, str(name))
        if not isinstance(read, dict) or not read:
            raise ConfigError(f"{name}: is no recipe; it takes sections such as model, data and optimizer")
        base = read.pop("base", None)
        if base is not None and (not isinstance(base, str) or not base):
            raise ConfigError.not_allowed("base", base, "the name or path of a recipe")
        values = merge(read, values)
        beside = None if base is None or place is None else place.parent / base
        name = beside if beside is not None and beside.is_file() else base
    return values


def read_recipe(recipe: str | Path) -> tuple[str, Path | None]:
    """A recipe's text, and its path where it is no recipe of the package."""
    if str(recipe) in recipe_names():
        return (resources.files("siamesenorm") / "recipes" / f"{recipe}{ENDING}").read_text(encoding="utf-8"), None
    path = Path(recipe)
    try:
        path = path / "config.yaml" if path.is_dir() else path
        if path.is_file():
            return read_text(path, "recipe", LARGEST), path
    except DataError as error:
        raise ConfigError(str(error)) from None
    except OSError as error:
        raise ConfigError(f"recipe: {shown(str(recipe))} cannot be read: {reason_of(error)}") from None
    raise ConfigError(
        f"recipe: unknown name {shown(str(recipe))}, and no file of that name; known names: {', '.join(recipe_names())}"
    )


def merge(base: Mapping[str, Any], changes: Mapping[str, Any]) -> dict[str, Any]:
    """Sections of `base` with the fields of `changes` in their place; steps, tokens and epochs stand for each other."""
    merged = dict(base)
    for name, value in changes.items():
        inner = merged.get(name)
        if isinstance(inner, dict) and isinstance(value, dict):
            if name == "train":
                inner = {k: v for k, v in inner.items() if not (STAND_IN & {*value} and k in STAND_IN)}
            merged[name] = merge(inner, value)
        else:
            merged[name] = value
    return merged


STAND_IN = {"steps", "tokens", "epochs"}


def parse_config(values: Mapping[str, Any]) -> RunConfig:
    """A checked configuration, or one sentence about what is wrong with it."""
    config = config_class(values.get("task"))
    try:
        parsed = config.model_validate(dict(values), strict=True)
        find_task(parsed.task).check(parsed)
    except ValidationError as error:
        raise ConfigError(explain(error, config)) from None
    except ValueError as error:
        raise ConfigError(str(error)) from None
    return parsed


def config_class(task: Any) -> type[RunConfig]:
    """`RunConfig` with the sections of a task."""
    if task is None:
        raise ConfigError(f"task: is missing; it takes one of {', '.join(TASKS)}")
    if not isinstance(task, str) or task not in {**TASKS, **OWN}:
        raise ConfigError.unknown("task", task, TASKS)
    return _config_class(find_task(task))


@functools.lru_cache
def _config_class(task: type[Task]) -> type[RunConfig]:
    own = {name: (section.__doc__ or "").strip() for name, section in task.sections.items()}
    about = {**own, **{name: field.description or "" for name, field in RunConfig.model_fields.items()}}
    fields: dict[str, Any] = {"task": (Literal[task.name], Field(description=about["task"]))}
    for name, section in task.sections.items():
        required = any(field.is_required() for field in section.model_fields.values())
        info = Field(description=about[name]) if required else Field(default=section(), description=about[name])
        general = RunConfig.model_fields.get(name)
        marked = general is not None and HOW in general.metadata
        fields[name] = (Annotated[section, HOW] if marked else section, info)
    config: type[RunConfig] = create_model(f"{task.name.title()}RunConfig", __base__=RunConfig, **fields)
    copyreg.pickle(config, lambda own: (parse_config, (own.as_dict(),)))  # made here, so it has no name to pickle
    return config


def in_steps(config: RunConfig, opened: dict[str, int | None] | None = None) -> RunConfig:
    """The same run with steps instead of epochs; one that has no epochs comes back as it is, its data unopened.

    opened: samples of an epoch by data section, of runs that share their data.
    """
    if config.train.epochs is None:
        return config
    opened, data = {} if opened is None else opened, json.dumps([config.task, config.as_dict()["data"]])
    if data not in opened:
        opened[data] = find_task(config.task)(config).epoch_samples
    try:
        return config.in_steps(opened[data])
    except ValidationError as error:
        raise ConfigError(explain(error, type(config))) from None
    except ValueError as error:
        raise ConfigError(str(error)) from None
