"""What is checked and opened before the cells of a grid run: fields, data, grafts, the folder.

prepared = prepare_grid(Grid("lm-tiny", ("pre", "siamese"), (4e-3, 1.6e-2), seeds=(0, 1, 2)), "runs/mine")
local_engine(jobs=2).run(prepared.plan, prepared.provenance, GridWatcher())
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from siamesenorm.data.atomic import locked_folder, write_json
from siamesenorm.data.documents import Reading, Source
from siamesenorm.data.held_out import LEAST as LEAST_TOKENS
from siamesenorm.data.held_out import NEEDED, hold_out
from siamesenorm.data.preparation import prepare
from siamesenorm.data.sources import find_sources, read_documents
from siamesenorm.data.texts import HELD_OUT
from siamesenorm.data.tokenizer import ByteTokenizer
from siamesenorm.errors import ConfigError
from siamesenorm.lab.compare.grafts import GraftPlan, GraftSource, check_awake
from siamesenorm.lab.compare.grid import GRID, Cell, Grid
from siamesenorm.lab.compare.own_model import check_own_models
from siamesenorm.lab.compare.runner import DONE, CellProgress, plan
from siamesenorm.tasks import Task, find_task
from siamesenorm.tasks.metrics import DECIDED_BY, LEAST
from siamesenorm.train.facts import changed_data, read_facts
from siamesenorm.train.init_from import starting_hash
from siamesenorm.train.parameters import share_of
from siamesenorm.train.provenance import data_hashes, origin

DATA = "data"
LONGEST_NAME = 40
"""Signs that a text's own name gives its folder."""


@dataclass(frozen=True)
class Prepared:
    """A grid that is ready to run: checked, its data opened once, its folder written."""

    grid: Grid
    out: Path
    plan: list[CellProgress]
    provenance: dict[str, Any]
    complete: bool = True
    """False once a run of it was interrupted."""

    @property
    def done(self) -> list[Path]:
        """Folders of cells that have a result."""
        return [progress.folder for progress in self.plan if progress.state in DONE]

    @property
    def failed(self) -> list[CellProgress]:
        """Cells that could not be run."""
        return [progress for progress in self.plan if progress.state == "failed"]


def prepare_text(source: Path, out: Path) -> Path:
    """Token shards of a user's text, a part of which is held out; the same text is not prepared twice.

    The path is absolute, so that runs on it can be looked at from any folder.
    """
    sources = find_sources([source])
    digest = hashlib.sha256("".join(found.sha256() for found in sources).encode()).hexdigest()
    name = re.sub(r"[^\w.-]+", "_", source.resolve().stem)[:LONGEST_NAME]
    folder = out.resolve() / DATA / f"{name}-{digest[:8]}"
    _check_length(source, sources)
    prepare([source], folder, validation=HELD_OUT, overwrite=True)
    return folder


def _check_length(text: Path, sources: Sequence[Source]) -> None:
    """Raise, before anything is written, where too little can be held out to compare by."""
    tokenizer = ByteTokenizer()
    reading = hold_out(sources, Reading(validation=HELD_OUT), tokenizer)
    texts = (part.text for part in read_documents(sources, reading) if part.split == "validation")
    held_out = 0
    for part in texts:
        held_out += len(tokenizer.encode(part))
        if held_out >= LEAST_TOKENS:
            return
    raise ConfigError(
        f"--text: of {str(text)!r} {held_out:,} bytes can be held out, too few to compare by; "
        f"it takes {LEAST_TOKENS:,}, from {NEEDED:,} bytes or more of different text"
    )


def check_metric(task: str, name: str) -> None:
    """Raise if a task gives no number of a name that runs can be compared by; what a run measures is known later."""
    kind = find_task(task)
    known = kind.metric(name)
    if known is None or (known.higher is None and not name.startswith("lm_eval/")):
        single = (other for other in kind.metrics.items() if not other[0].endswith("/"))
        names = [other for other, metric in single if metric.higher is not None]
        raise ConfigError.unknown("--metric", name, names)


def check_measured(task: Task, name: str) -> None:
    """Raise if a run would not measure a number, or on too little to compare by."""
    if name != "loss":  # which every evaluation has
        measured = [other for other, metric in task.measures().items() if metric.higher is not None]
        plain = name.partition(" (")[0] if name.startswith("lm_eval/") else name  # a filter is not known before
        if plain not in measured:
            raise ConfigError(
                f"--metric: {name!r} is not measured by these runs; it takes one of {', '.join(measured)}"
            )
    of = "" if (known := task.metric(name)) is None else known.of
    size = task.held_out_sizes().get(of)
    if size is not None and size < LEAST[of]:
        raise ConfigError(
            f"evaluation: {size:,} {of} are too few to compare {name} by; it takes {LEAST[of]:,} or more "
            f"({getattr(task, 'decided_by', DECIDED_BY[of])})"
        )


class OneComparison(contextlib.ExitStack):
    """Keeps a second comparison out of a folder, from the moment on when there is one."""

    def __init__(self, folder: Path) -> None:
        super().__init__()
        self.folder, self.taken = folder, False

    def take(self) -> None:
        """Raise if the folder is another one's; nothing where there is no folder yet."""
        if not self.taken and self.folder.is_dir():
            try:
                self.enter_context(locked_folder(self.folder, "--out: another comparison"))
            except OSError as error:
                raise ConfigError.failed("--out", self.folder, "used", error) from None
            self.taken = True


def prepare_grid(
    grid: Grid,
    out: Path | str,
    metric: str | None = None,
    one: OneComparison | None = None,
    source: GraftSource | None = None,
) -> Prepared:
    """Check every cell and the data; bad input raises before anything is written.

    metric: what cells are to be compared by; the held-out loss if it is not said.
    one: takes the folder before anything is written into it.
    source: what all runs go on from; its grafts are made here.
    """
    cells = grid.cells()
    for config in {(cell.topology, cell.config.train.parameters): cell.config for cell in cells}.values():
        share_of(config, find_task(config.task).model_of)  # says what is wrong with the choice
        if source is not None:
            check_awake(source, config)
    places = plan(cells, Path(out))
    facts: dict[str, Any] = origin()
    tasks: list[Any] = []
    for cell in _different_data(cells):
        tasks.append(find_task(cell.config.task)(cell.config))
        check_measured(tasks[-1], metric or "loss")  # the data are opened and checked
        facts["data"] |= data_hashes(cell.config)
    check_own_models(places)
    _check_kept(places, facts["data"])
    folder = Path(out)
    grafts = None if source is None else GraftPlan(source, folder, grid.topologies)
    if grafts is not None:
        grafts.check(tasks)
        facts["graft"] = grafts.facts
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if one is not None:
            one.take()
        if grafts is not None:
            grafts.write()
        write_json(folder / GRID, {**grid.as_dict(), **facts, "cells": [place.folder.name for place in places]})
    except OSError as error:
        raise ConfigError.failed("--out", folder, "written", error) from None
    return Prepared(grid, folder, places, facts)


def _check_kept(places: Sequence[CellProgress], hashes: dict[str, str]) -> None:
    """Raise if cells that have begun learnt from other data, or other first weights, than there are now."""
    starts: dict[str | None, str | None] = {}
    for progress in places:
        known, source = read_facts(progress.folder).get("init_from_sha256"), progress.cell.config.train.init_from
        if known is not None and source not in starts:
            starts[source] = starting_hash(progress.cell.config)
        if known is not None and starts[source] not in (None, known):
            raise ConfigError(
                f"train.init_from: {source!r} is not what it was when {progress.cell.name} began; give another --out"
            )
        for name in changed_data(progress.folder, hashes):
            raise ConfigError(
                f"data: {name!r} is not what it was when {progress.cell.name} was trained; give another --out"
            )


def _different_data(cells: Sequence[Cell]) -> list[Cell]:
    """One cell for every data section, so that each is opened once."""
    found = {json.dumps([cell.config.as_dict()[s] for s in ("data", "evaluation")]): cell for cell in cells}
    return list(found.values())
