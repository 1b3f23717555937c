"""The cells of a comparison: topologies × learning rates × seeds × any field of the configuration.

grid = Grid("lm-tiny", topologies=("pre", "siamese"), lrs=(1e-3, 4e-3), seeds=(0, 1))
for cell in grid.cells():
    train(cell.config, folder / cell.name)

A cell's seed decides its first weights and the order of its data, whatever its topology; so cells that differ in the
topology alone are pairs.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

from siamesenorm.train.config import RunConfig
from siamesenorm.train.epochs import in_steps
from siamesenorm.train.errors import ConfigError
from siamesenorm.train.fields import fields_of, shown
from siamesenorm.train.overrides import find_field
from siamesenorm.train.recipes import config_class, load_recipe, resolve

GRID = "grid.json"
"""The file in a grid's folder that says what was asked."""
LARGEST = 10_000
"""Cells of a grid; more are a slip of the finger."""
LONGEST = 80
"""Characters of a cell's name before its fingerprint."""
OWN_OPTIONS = {"model.topology": "--topologies", "optimizer.lr": "--lrs", "train.seed": "--seeds"}
"""Fields that every grid has an axis for."""
OPTIMIZER, PARAMETERS = "optimizer.kind", "train.parameters"
"""Fields that keep runs apart in every report."""
QUIET = ("logging.tensorboard=false",)
"""Set for every cell, unless the user says otherwise."""


@dataclass(frozen=True)
class Setting:
    """One value of an axis: overrides that belong together, under one label."""

    label: str
    overrides: tuple[str, ...]


class OnAxes:
    """What has a place on the axes that every grid has."""

    config: RunConfig

    @property
    def topology(self) -> str:
        """What the residual stream does in it."""
        return str(getattr(self.config.model, "topology", ""))

    @property
    def lr(self) -> float:
        """Peak learning rate."""
        return self.config.optimizer.lr

    @property
    def seed(self) -> int:
        """What decides first weights and data order."""
        return self.config.train.seed


@dataclass(frozen=True)
class Cell(OnAxes):
    """One run of a grid."""

    config: RunConfig
    settings: tuple[str, ...] = ()
    """Labels of its values on the grid's further axes."""

    @property
    def name(self) -> str:
        """A folder's name: readable, and different for every configuration."""
        text = "-".join([self.topology, f"lr={self.lr:g}", *self.settings, f"seed={self.seed}"])
        return f"{re.sub(r'[^A-Za-z0-9_.=+-]+', '_', text)[:LONGEST]}-{fingerprint(self.config)}"


@dataclass(frozen=True)
class Grid:
    """What is asked: every combination of the axes is a cell."""

    recipe: str | Mapping[str, Any]
    """Its name, or its values."""
    topologies: tuple[str, ...]
    lrs: tuple[float, ...]
    seeds: tuple[int, ...] = (0,)
    overrides: tuple[str, ...] = ()
    """The same for all cells."""
    axes: tuple[tuple[Setting, ...], ...] = ()
    """What else differs between cells."""
    preset: str | None = None
    starts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Overrides by topology: what its runs begin with; first weights of their own where it says nothing."""

    def cells(self) -> list[Cell]:
        """Every cell, checked, those that make pairs next to each other and a whole seed before the next."""
        sizes = [len(axis) for axis in (self.topologies, self.lrs, self.seeds, *self.axes)]
        if not all(sizes) or math.prod(sizes) > LARGEST:
            raise ConfigError(f"grid: {math.prod(sizes)} cells are not allowed; it takes 1 to {LARGEST}")
        combinations = itertools.product(self.seeds, itertools.product(*self.axes), self.lrs, self.topologies)
        cells = [self._cell(*combination) for combination in combinations]
        counts = Counter(cell.name for cell in cells)
        for cell in cells:
            if counts[cell.name] > 1:
                where = " ".join([cell.topology, f"lr={cell.lr:g}", *cell.settings, f"seed={cell.seed}"])
                raise ConfigError(f"grid: the cell {where} stands twice; give every value once")
        return cells

    def _cell(self, seed: int, settings: tuple[Setting, ...], lr: float, topology: str) -> Cell:
        own = [override for setting in settings for override in setting.overrides]
        axes = [f"model.topology={topology}", f"optimizer.lr={lr!r}", f"train.seed={seed}"]
        axes += self.starts.get(topology, ())
        config = in_steps(resolve(self.recipe, [*QUIET, *self.overrides, *own, *axes]))
        if getattr(config.evaluation, "every", 0) is None:
            raise ConfigError("evaluation.every: null is not allowed in a comparison; it takes steps, 1 or more")
        return Cell(config, tuple(setting.label for setting in settings))

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def fingerprint(config: RunConfig) -> str:
    """Eight digits that differ where configurations do, apart from how runs are computed, shown and saved."""
    values = config.as_dict()
    values = config.decisive() | {name: values[name] for name in ("evaluation", "divergence")}  # which decide results
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


# What users write ------------------------------------------------------------------------------------------


def parse_topologies(texts: Iterable[str]) -> tuple[str, ...]:
    """``pre,siamese:form=plain,input_norm=true`` in parts: what has an = before any colon belongs to the one before."""
    found: list[str] = []
    for text in texts:
        for number, part in enumerate(text.split(",")):
            equals, colon = part.find("="), part.find(":")
            if number and equals >= 0 and not 0 <= colon < equals:
                found[-1] += f",{part.strip()}"
            else:
                found.append(part.strip())
    return tuple(found)


def parse_numbers(texts: Iterable[str], option: str, kind: type[int] | type[float]) -> tuple[Any, ...]:
    """``1e-3,4e-3`` as numbers."""
    found = []
    for part in (part.strip() for text in texts for part in text.split(",")):
        try:
            number = kind(part)
        except ValueError:
            number = math.nan
        if not math.isfinite(number) or number < 0:
            what = "whole numbers, such as 0,1,2" if kind is int else "numbers, such as 1e-3,4e-3"
            raise ConfigError(f"{option}: {shown(part)} is not allowed; it takes {what}")
        found.append(number)
    return tuple(found)


def parse_setting(recipe: str | Mapping[str, Any], text: str) -> tuple[Setting, ...]:
    """``warmup=0,30`` as the values of an axis; a single value is the same for all cells."""
    key, equals, values = text.partition("=")
    if not equals or not key.strip() or not values.strip():
        raise ConfigError(f"--set: {shown(text)} is not allowed; it takes field=value,value (a recipe: --recipe)")
    fields = {field.path: field for field in fields_of(config_class(load_recipe(recipe).get("task")))}
    path = find_field(key.strip(), fields).path
    if path in OWN_OPTIONS:
        raise ConfigError(f"--set: {path} has an option of its own; use {OWN_OPTIONS[path]}")
    parts = split_values(values)
    return tuple(Setting(f"{short_name(path)}={part}", (f"{path}={part}",)) for part in parts)


def short_name(path: str) -> str:
    """What a field is called in labels: the last part of its name, where that says enough."""
    return "optimizer" if path == OPTIMIZER else path.rpartition(".")[2]


def split_values(text: str) -> list[str]:
    """Parts between commas that no bracket encloses."""
    parts, depth = [""], 0
    for sign in text:
        depth += (sign in "[{(") - (sign in "]})")
        if sign == "," and depth == 0:
            parts.append("")
        else:
            parts[-1] += sign
    return [part.strip() for part in parts]


def depth_axis(recipe: str | Mapping[str, Any], overrides: Sequence[str], depths: Sequence[int]) -> tuple[Setting, ...]:
    """Numbers of blocks with the width that keeps the number of parameters nearest to the recipe's."""
    model = resolve(recipe, overrides).model
    names = ("vocab_size", "dim", "blocks", "heads", "ffn_dim")
    if not all(hasattr(model, name) for name in names):
        raise ConfigError(f"--depths: a {type(model).__name__} is not allowed; it takes a language model")
    vocabulary, dim, blocks, heads, ffn_dim = (int(getattr(model, name)) for name in names)

    def parameters(blocks: int, dim: int) -> int:
        return blocks * (4 * dim**2 + 3 * dim * round(dim * ratio)) + 2 * vocabulary * dim

    ratio = ffn_dim / dim
    wanted, unit = parameters(blocks, dim), 2 * heads
    axis = []
    for depth in depths:
        if depth < 1:
            raise ConfigError(f"--depths: {depth} is not allowed; it takes numbers of blocks, such as 6,12,24")
        widths = range(unit, max(2 * unit, dim * (2 + math.isqrt(blocks))), unit)
        width = min(widths, key=lambda width: abs(parameters(depth, width) - wanted))
        shape = {"blocks": depth, "dim": width, "ffn_dim": round(width * ratio)}
        overrides = tuple(f"model.{name}={value}" for name, value in shape.items())
        axis.append(Setting(f"blocks={depth}", overrides))
    return tuple(axis)
