"""A comparison from the grid to the report: what the command ``siamesenorm compare`` does, for Python too.

prepared = prepare_grid(Grid("lm-tiny", ("pre", "siamese"), (4e-3, 1.6e-2), seeds=(0, 1, 2)), "runs/mine")
local_engine(jobs=2).run(prepared.plan, prepared.provenance, Watcher())
verdict(analyse(read_records(prepared.done)))
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from siamesenorm.data.atomic import write_json
from siamesenorm.lab.grid import Cell, Grid
from siamesenorm.lab.provenance import command, cores, data_hashes, machine_facts
from siamesenorm.lab.runner import LocalEngine, Progress, Watcher, plan
from siamesenorm.tasks import find_task
from siamesenorm.train.errors import ConfigError

GRID = "grid.json"


class Engine(Protocol):
    """Where cells run."""

    def run(self, plan: Sequence[Progress], provenance: dict[str, Any], watcher: Watcher) -> bool:
        """Run what is not done yet; False if it was interrupted."""


@dataclass(frozen=True)
class Prepared:
    """A grid that is ready to run: checked, its data opened once, its folder written."""

    grid: Grid
    out: Path
    plan: list[Progress]
    provenance: dict[str, Any]

    @property
    def done(self) -> list[Path]:
        """Folders of cells that have a result."""
        return [progress.folder for progress in self.plan if progress.state in ("finished", "diverged")]


def prepare_grid(grid: Grid, out: Path | str) -> Prepared:
    """Check every cell and the data; bad input raises before anything is written."""
    cells = grid.cells()
    places = plan(cells, Path(out))
    facts: dict[str, Any] = {**machine_facts(), "command": command(), "data": {}}
    for cell in _different_data(cells):
        find_task(cell.config.task)(cell.config)  # opens the data and checks it
        facts["data"] |= data_hashes(cell.config)
    folder = Path(out)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        write_json(folder / GRID, {**grid.as_dict(), **facts, "cells": [cell.name for cell in cells]})
    except OSError as error:
        raise ConfigError(f"--out: {str(folder)!r} cannot be written: {error.strerror or error}") from None
    return Prepared(grid, folder, places, facts)


def _different_data(cells: Sequence[Cell]) -> list[Cell]:
    """One cell for every data section, so that each is opened once."""
    found = {json.dumps([cell.config.as_dict()[s] for s in ("data", "evaluation")]): cell for cell in cells}
    return list(found.values())


def local_engine(jobs: int | None = None) -> LocalEngine:
    """As many processes as asked for, or one a core, or one a GPU."""
    import torch

    gpus = torch.cuda.device_count()
    return LocalEngine(jobs or gpus or cores(), gpus=gpus)
