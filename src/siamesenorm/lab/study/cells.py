"""From a plan to its cells: the search first, then what the search's winner of each arm is trained for.

for cell in cells_of(file, part, records):
    cell.name, cell.config

A cell is known by a hash of all that the plan says of it, data by their content: so records tell on any machine which
cells are done, whatever else the plan has come to hold.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

from siamesenorm.errors import ConfigError
from siamesenorm.lab.compare.grid import QUIET, Cell
from siamesenorm.lab.report.records import by_content
from siamesenorm.lab.study.plan import LR, OPTIMIZER, SCHEDULE, SEED, TOPOLOGY, PlanFile, StudyPart, Values
from siamesenorm.lab.study.record import Record
from siamesenorm.train.config import RunConfig
from siamesenorm.train.overrides import as_overrides
from siamesenorm.train.recipes import in_steps, resolve

Stage = Literal["search", "fresh", "sensitivity", "stress"]
KEY = 16
"""Digits of a cell's hash."""


@dataclass(frozen=True)
class StudyCell(Cell):
    """One run of a study, and where it stands in the plan."""

    part: str = ""
    corpus: str = ""
    size: str = ""
    optimizer: str = ""
    arm: str = ""
    stage: Stage = "search"
    number: int = 0
    """Which draw, seed, rate, or seed of which factor."""
    drawn: Values = field(default_factory=dict)
    factor: float | None = None
    """Times the best learning rate, in a stress."""
    key: str = ""

    @property
    def name(self) -> str:
        """``perl/0.15M/adamw/siamese/search-3``, fit for a folder."""
        return re.sub(r"[^A-Za-z0-9_.=+-]+", "_", self.title.replace("/", "-")) + f"-{self.key[:8]}"

    @property
    def title(self) -> str:
        """What it is called in records and by who repeats it."""
        last = f"{self.stage}-{self.number}" + ("" if self.factor is None else f"-x{self.factor:g}")
        return "/".join((self.corpus, self.size, self.optimizer, self.arm, last))


def cells_of(file: PlanFile, part: StudyPart, records: Mapping[str, Record]) -> list[StudyCell]:
    """The cells of a part that can be run by now, done or not, in the order they are run.

    records: by key. An arm's later cells come into being when its search is complete.
    """
    plan = file.plan
    search = [
        _cell(file, part, arm, "search", number, plan.search.run_seed, plan.search.draw(number))
        for number in range(part.configurations)  # a draw of every arm before the next: cut anywhere, arms are equal
        for arm in plan.arms_of(part)
    ]
    best = {arm: winner([cell for cell in search if cell.arm == arm], records) for arm in plan.arms_of(part)}
    known = {arm: cell.drawn for arm, cell in best.items() if cell is not None}
    fresh = [
        _cell(file, part, arm, "fresh", number, seed, drawn)
        for number, seed in enumerate(plan.seeds[: part.seeds])
        for arm, drawn in known.items()
    ]
    stress, sensitivity = [], []
    if part.stress and plan.stress is not None:
        stress = [
            _cell(file, part, arm, "stress", number, seed, _stressed(file, part, arm, drawn, factor), factor)
            for number, seed in enumerate(plan.seeds[: plan.stress.seeds])
            for factor in plan.stress.factors
            for arm, drawn in known.items()
        ]
    if part.sensitivity and plan.sensitivity is not None:
        sensitivity = [
            _cell(file, part, arm, "sensitivity", number, plan.search.run_seed, {**drawn, LR: rate})
            for number, rate in enumerate(plan.sensitivity.rates)
            for arm, drawn in known.items()
        ]
    return [*search, *fresh, *sensitivity, *stress]


def counts_of(file: PlanFile, part: StudyPart) -> dict[Stage, int]:
    """How many cells of each stage a part has when it is complete."""
    plan, arms = file.plan, len(file.plan.arms_of(part))
    found: dict[Stage, int] = {"search": part.configurations * arms, "fresh": part.seeds * arms}
    if part.sensitivity and plan.sensitivity is not None:
        found["sensitivity"] = len(plan.sensitivity.rates) * arms
    if part.stress and plan.stress is not None:
        found["stress"] = len(plan.stress.factors) * min(plan.stress.seeds, len(plan.seeds)) * arms
    return found


def winner(search: Sequence[StudyCell], records: Mapping[str, Record]) -> StudyCell | None:
    """The configuration with the best number, the first of equals; None until all are done.

    Where none reached its end, the one that came farthest.
    """
    found = [records.get(cell.key) for cell in search]
    if not found or any(record is None for record in found):
        return None
    ranked = [(*record.rank, number) for number, record in enumerate(found) if record is not None]
    return search[min(ranked)[-1]]


def find_cell(file: PlanFile, records: Mapping[str, Record], title: str) -> StudyCell:
    """The cell of a title; raises where there is none, or none yet."""
    known = [cell for part in file.plan.parts for cell in cells_of(file, part, records)]
    for cell in known:
        if title in (cell.title, cell.name, cell.key):
            return cell
    titles = [cell.title for cell in known if cell.key in records]
    near = ", ".join(titles[:3]) or "none yet"
    raise ConfigError(f"--challenge: {title!r} is no cell of the plan that could run by now; such are {near}")


def _stressed(file: PlanFile, part: StudyPart, arm: str, drawn: Values, factor: float) -> Values:
    """The best settings with a constant rate, so many times the best."""
    best = drawn[LR] if LR in drawn else config_of(file, part, arm, file.plan.search.run_seed, drawn).optimizer.lr
    return {**drawn, SCHEDULE: "constant", LR: float(f"{best * factor:.6g}")}


def _cell(
    file: PlanFile,
    part: StudyPart,
    arm: str,
    stage: Stage,
    number: int,
    seed: int,
    drawn: Values,
    factor: float | None = None,
) -> StudyCell:
    settings = (part.corpus, part.size, part.optimizer, stage) + (() if factor is None else (f"x{factor:g}",))
    return StudyCell(
        config_of(file, part, arm, seed, drawn),
        settings,
        part.name,
        part.corpus,
        part.size,
        part.optimizer,
        arm,
        stage,
        number,
        drawn,
        factor,
        key_of(file, part, arm, seed, drawn),
    )


def _fields(file: PlanFile, part: StudyPart, arm: str, seed: int, drawn: Values) -> Values:
    plan = file.plan
    return {
        **plan.set,
        **plan.sizes[part.size].set,
        **plan.corpora[part.corpus].set,
        OPTIMIZER: part.optimizer,
        **drawn,
        TOPOLOGY: plan.arms[arm],
        SEED: seed,
    }


_resolved: dict[str, RunConfig] = {}


def config_of(file: PlanFile, part: StudyPart, arm: str, seed: int, drawn: Values) -> RunConfig:
    """The configuration of a cell, checked."""
    overrides = [*QUIET, *as_overrides(_fields(file, part, arm, seed, drawn))]
    wanted = json.dumps([file.recipe, overrides], sort_keys=True)
    if wanted not in _resolved:  # the same cells are asked for again and again while a study runs
        try:
            _resolved[wanted] = in_steps(resolve(file.recipe, overrides))
        except ConfigError as error:
            raise ConfigError(f"plan: {part.name}, {arm}: {error}") from None
    return _resolved[wanted]


def key_of(file: PlanFile, part: StudyPart, arm: str, seed: int, drawn: Values) -> str:
    """A hash of the recipe and of every field that the plan sets, data by their hashes."""
    fields = _fields(file, part, arm, seed, drawn)
    hashes = file.plan.corpora[part.corpus].sha256
    said = {name: by_content(value, hashes) for name, value in fields.items()}
    text = json.dumps({"recipe": {**file.recipe, "about": ""}, "set": said}, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:KEY]
