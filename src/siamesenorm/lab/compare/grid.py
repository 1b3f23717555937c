"""The cells of a comparison: topologies × learning rates × seeds × any field of the configuration.

grid = Grid("lm-tiny", topologies=("pre", "siamese"), lrs=(1e-3, 4e-3), seeds=(0, 1))
for cell in grid.cells():
    train(cell.config, folder / cell.name)

A cell's seed decides its first weights and the order of its data, whatever its topology; so cells that differ in the
topology alone are pairs.
"""

from __future__ import annotations

import functools
import hashlib
import itertools
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from siamesenorm.errors import ConfigError
from siamesenorm.train.config import RunConfig
from siamesenorm.train.recipes import in_steps, resolve

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
class AxisValue:
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
    axes: tuple[tuple[AxisValue, ...], ...] = ()
    """What else differs between cells."""
    preset: str | None = None
    starts: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Overrides by topology: what its runs begin with; first weights of their own where it says nothing."""

    def cells(self) -> list[Cell]:
        """Every cell, checked, those that make pairs next to each other and a whole seed before the next."""
        return list(self._cells)

    @functools.cached_property
    def _cells(self) -> list[Cell]:
        sizes = [len(axis) for axis in (self.topologies, self.lrs, self.seeds, *self.axes)]
        if not all(sizes) or math.prod(sizes) > LARGEST:
            raise ConfigError(f"grid: {math.prod(sizes)} cells are not allowed; it takes 1 to {LARGEST}")
        combinations = itertools.product(self.seeds, itertools.product(*self.axes), self.lrs, self.topologies)
        opened: dict[str, int | None] = {}
        cells = [self._cell(*combination, opened) for combination in combinations]
        counts = Counter(cell.name for cell in cells)
        for cell in cells:
            if counts[cell.name] > 1:
                where = " ".join([cell.topology, f"lr={cell.lr:g}", *cell.settings, f"seed={cell.seed}"])
                raise ConfigError(f"grid: the cell {where} is there twice; give every value once")
        return cells

    def _cell(
        self, seed: int, settings: tuple[AxisValue, ...], lr: float, topology: str, opened: dict[str, int | None]
    ) -> Cell:
        own = [override for setting in settings for override in setting.overrides]
        axes = [f"model.topology={topology}", f"optimizer.lr={lr!r}", f"train.seed={seed}"]
        axes += self.starts.get(topology, ())
        config = in_steps(resolve(self.recipe, [*QUIET, *self.overrides, *own, *axes]), opened)
        if getattr(config.evaluation, "every", 0) is None:
            raise ConfigError("evaluation.every: null is not allowed in a comparison; it takes steps, 1 or more")
        return Cell(config, tuple(setting.label for setting in settings))

    def on(self, data: Path) -> Grid:
        """The same on other training data, which a field of the user's still goes before."""
        return replace(self, overrides=(f"data.train={json.dumps([str(data)])}", *self.overrides))

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def fingerprint(config: RunConfig) -> str:
    """Eight digits that differ where configurations do, apart from how runs are computed, shown and saved."""
    values = config.as_dict()
    values = config.decisive() | {name: values[name] for name in ("evaluation", "divergence")}  # which decide results
    return hashlib.sha256(json.dumps(values, sort_keys=True).encode()).hexdigest()[:8]


def short_name(path: str) -> str:
    """What a field is called in labels: the last part of its name, where that says enough."""
    return "optimizer" if path == OPTIMIZER else path.rpartition(".")[2]
