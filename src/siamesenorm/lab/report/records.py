"""Finished runs as the laboratory looks at them: from any folders, of any machine, each once."""

from __future__ import annotations

import functools
import hashlib
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from siamesenorm.data.listing import walk
from siamesenorm.errors import ConfigError
from siamesenorm.lab.compare.grid import GRID, OPTIMIZER, OWN_OPTIONS, PARAMETERS, OnAxes, short_name
from siamesenorm.tasks import find_task
from siamesenorm.train.config import RunConfig
from siamesenorm.train.divergence import LEARNT
from siamesenorm.train.facts import read_facts
from siamesenorm.train.folder import CONFIG, AsWritten, RunFolder, read_metrics, read_written

UNCOUNTED = ("every", "at_once", "lm_eval")
"""Fields of the evaluation that decide when and how it runs, and no number that runs are compared by."""
POINTS = 200
"""Points of a loss curve in a report; each is the mean of what lies between it and the one before."""
CHANCE = 0.1
"""How far below the loss of having learnt nothing of its input a run must come to have learnt something."""
SHORT = 8
"""Digits of a hash that tell data, or first weights, apart."""
INIT_FROM = "train.init_from"


@dataclass(frozen=True)
class Run(OnAxes):
    """One run and how it ended."""

    name: str
    folder: Path
    config: RunConfig
    state: str
    """finished, diverged, stuck (at the end it knows nothing of its input and learns no more), or where it stopped."""
    step: int
    evaluation: dict[str, float]
    curve: list[tuple[int, float]]
    """Step and training loss."""
    evaluations: list[tuple[int, dict[str, float]]]
    """Step and what was measured; `evaluation` is the last of them."""
    step_seconds: float | None
    """Median."""
    message: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    held_out: dict[str, float] = field(default_factory=dict)
    """How many tokens, images, … its numbers were measured on."""
    directions: dict[str, bool] = field(default_factory=dict)
    """Whether more is better, of the numbers that it says this of."""
    chance_loss: float | None = None
    """The loss of having learnt nothing of the input."""
    parameters: dict[str, float] = field(default_factory=dict)
    """How many are trained, and of how many."""

    @functools.cached_property
    def identity(self) -> str:
        """The same for the same run on any machine: data count by their hashes, not by where they lie."""
        return hashlib.sha256(json.dumps(self.fields, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def fields(self) -> dict[str, Any]:
        """Every field that decides the run, by dotted name; corpora and first weights by known hashes."""
        values, hashes = self.config.decisive(), self.facts.get("data", {})
        values["data"] = {name: by_content(value, hashes) for name, value in values["data"].items()}
        if self.config.train.init_from in self.graft.get("starts", {}).values():
            values["train"]["init_from"] = self.graft.get("weights")  # grafts of one model start from the same function
            values["model"] |= self.graft.get("fields", {})  # and have what they change for that
        else:
            values["train"]["init_from"] = self.facts.get("init_from_sha256") or self.config.train.init_from
        values["divergence"] = self.config.divergence.model_dump(mode="json")
        evaluation = self.config.as_dict()["evaluation"].items()
        values["evaluation"] = {name: value for name, value in evaluation if name not in UNCOUNTED}
        return dict(_flat(values))

    @property
    def graft(self) -> dict[str, Any]:
        """What is on record of the model that a comparison went on from; nothing where there is none."""
        return self.facts.get("graft") or {}

    @property
    def measured_early(self) -> int | None:
        """The step of its last evaluation, where a finished run went on behind it."""
        last = self.evaluations[-1][0] if self.evaluations else self.step
        return last if self.state == "finished" and last < self.step else None

    def score(self, metric: str) -> float | None:
        """Its last held-out number of a name, if it reached its end."""
        return self.evaluation.get(metric) if self.state == "finished" else None

    def higher_is_better(self, metric: str) -> bool | None:
        """Which way one of its numbers points; None if it is none to compare by."""
        known = find_task(self.config.task).metric(metric)
        return self.directions.get(metric, None if known is None else known.higher)

    def field_text(self, name: str) -> str:
        """The value of a field for people: data and first weights by names and the first digits of their hashes."""
        value = self.fields.get(name)
        section, _, rest = name.partition(".")
        if name == INIT_FROM and value is not None and value == self.facts.get("init_from_sha256"):
            return f"{Path(str(self.config.train.init_from)).name}@{value[:SHORT]}"
        if section != "data":
            return _text(value)
        named, hashes = self.config.as_dict()["data"].get(rest), self.facts.get("data", {})
        names = named if isinstance(named, list) else [named]
        return "+".join(
            f"{Path(each).name}@{hashes[each][:SHORT]}" if isinstance(each, str) and each in hashes else _text(each)
            for each in names
        )


@dataclass(frozen=True)
class Records:
    """Runs with what tells them apart beside topology, learning rate and seed."""

    runs: tuple[Run, ...]
    settings: dict[str, str]
    """By identity: ``blocks=6``, or nothing where all runs agree."""
    unfinished: tuple[str, ...] = ()
    duplicates: tuple[tuple[str, float | None], ...] = ()
    """Runs that were there before, and how far their losses lie apart."""
    differences: tuple[tuple[str, tuple[str, ...]], ...] = ()
    """Fields in which runs differ, beside topology, learning rate and seed, with their values."""

    def setting(self, run: Run) -> str:
        """What tells a run apart."""
        return self.settings[run.identity]

    @property
    def topologies(self) -> list[str]:
        """In the order of the runs."""
        return list(dict.fromkeys(run.topology for run in self.runs))

    @property
    def groups(self) -> list[str]:
        """Settings in the order of the runs."""
        return list(dict.fromkeys(self.setting(run) for run in self.runs))

    @property
    def trainings(self) -> dict[str, list[str]]:
        """Optimisers and what they train, as far as runs differ in them, in the order of the runs, with settings."""
        kinds = {run.identity: (run.config.optimizer.kind, run.config.train.parameters) for run in self.runs}
        several = [len({kind[place] for kind in kinds.values()}) > 1 for place in (0, 1)]
        found: dict[str, dict[str, None]] = {}
        for run in self.runs:
            words = [word for word, wanted in zip(kinds[run.identity], several, strict=True) if wanted]
            label = ", ".join("all parameters" if word == "all" else word for word in words)
            found.setdefault(label, {})[self.setting(run)] = None
        return {label: list(settings) for label, settings in found.items()}

    @property
    def lrs(self) -> list[float]:
        """Ascending."""
        return sorted({run.lr for run in self.runs})

    @property
    def seeds(self) -> list[int]:
        """Ascending."""
        return sorted({run.seed for run in self.runs})


def find_runs(paths: Iterable[Path | str]) -> list[Path]:
    """Run folders among and below the paths, those of a grid in its order."""
    found: list[Path] = []
    for path in map(Path, paths):
        if not path.is_dir():
            raise ConfigError(f"run: {str(path)!r} is not a folder; it takes runs, or folders that hold some")
        below = []
        for folder, inner, files in walk(path):
            inner.sort()
            if CONFIG in files:
                below.append(Path(folder))
                inner.clear()
        if not below:
            raise ConfigError(f"run: {str(path)!r} holds no run; it takes runs, or folders that hold some")
        order = {name: number for number, name in enumerate(read_grid(path).get("cells", ()))}
        found += sorted(below, key=lambda folder: order.get(folder.name, len(order)))
    return list(dict.fromkeys(found))


class GridFile(AsWritten):
    """What is read of grid.json."""

    cells: list[str]
    preset: str | None = None


def read_grid(folder: Path) -> dict[str, Any]:
    """What grid.json says, nothing if it is not there or not sound."""
    return read_written(folder / GRID, GridFile) or {}


def read_run(folder: Path) -> Run:
    """One run from its folder."""
    run = RunFolder(folder)
    try:
        config = run.config()
    except ConfigError as error:
        raise ConfigError(f"{folder}: {error}") from None
    status, facts, metrics = run.status(), read_facts(folder), read_metrics(folder)
    losses = [(r["step"], r["loss"]) for r in metrics if isinstance(r.get("loss"), (int, float))]
    seconds = sorted(r["seconds"] for r in metrics if isinstance(r.get("seconds"), (int, float)))
    found = [(r["step"], r["evaluation"]) for r in metrics if isinstance(r.get("evaluation"), dict)]
    evaluation = _numbers(status.get("evaluation") or (found[-1][1] if found else {}), math.nan)
    state, chance = str(status.get("state", "unknown")), facts.get("chance_loss", status.get("chance_loss"))
    watched = find_task(config.task).chance_of
    levels = [level for r in metrics if isinstance(level := r.get(watched, r.get("loss")), (int, float))]
    if state == "finished" and isinstance(chance, (int, float)) and _stuck(levels, chance):
        state = "stuck"
    return Run(
        name=folder.name,
        folder=folder,
        config=config,
        state=state,
        step=int(status.get("step") or 0),
        evaluation=evaluation,
        curve=thinned(losses),
        evaluations=[(step, _numbers(values)) for step, values in found],
        step_seconds=seconds[len(seconds) // 2] if seconds else None,
        message=str(status.get("message", "")),
        facts=facts,
        held_out=_numbers(status.get("held_out")),
        directions={name: bool(higher) for name, higher in _numbers(status.get("higher_is_better")).items()},
        chance_loss=chance if isinstance(chance, (int, float)) else None,
        parameters=_numbers(status.get("parameters")),
    )


def _numbers(values: Any, nothing: float | None = None) -> dict[str, float]:
    """What of a mapping is numbers; nothing: stands for null, which is how a run writes what is no number."""
    given = values.items() if isinstance(values, dict) else ()
    known = {str(name): nothing if value is None else value for name, value in given}
    return {name: value for name, value in known.items() if isinstance(value, (int, float))}


def _stuck(losses: Sequence[float], chance: float) -> bool:
    """Whether the last quarter of a run knows nothing of its input and gained nothing on the one before."""
    quarter = len(losses) // 4
    if not quarter:
        return False
    before, last = sum(losses[-2 * quarter : -quarter]) / quarter, sum(losses[-quarter:]) / quarter
    return last > chance - CHANCE and before - last <= LEARNT


def read_records(folders: Iterable[Path]) -> Records:
    """All runs of the folders, each once, with what tells them apart."""
    runs: dict[str, Run] = {}
    unfinished: list[str] = []
    duplicates: list[tuple[str, float | None]] = []
    for run in map(read_run, folders):
        if run.state not in ("finished", "diverged", "stuck"):
            unfinished.append(run.name)
        elif run.identity in runs:
            one, other = runs[run.identity].score("loss"), run.score("loss")
            duplicates.append((run.name, None if one is None or other is None else abs(one - other)))
        else:
            runs[run.identity] = run
    if not runs:
        raise ConfigError("run: none of them is finished; a report takes finished or diverged runs")
    tasks = {run.config.task for run in runs.values()}
    if len(tasks) > 1:
        raise ConfigError(f"run: tasks {', '.join(sorted(tasks))} are not allowed together; a report takes one task")
    found = list(runs.values())
    settings, differences = _settings(found)
    return Records(tuple(found), settings, tuple(unfinished), tuple(duplicates), differences)


def _settings(runs: Sequence[Run]) -> tuple[dict[str, str], tuple[tuple[str, tuple[str, ...]], ...]]:
    """A label of the fields that differ, without those that follow from others; and all that differ, with values.

    Different data, first weights, optimisers and parameters follow from nothing, so these are always in the label.
    """
    fields = {run.identity: run.fields for run in runs}
    names = dict.fromkeys(name for values in fields.values() for name in values)
    differing = [n for n in names if n not in OWN_OPTIONS and len({_text(v.get(n)) for v in fields.values()}) > 1]
    # dim and ffn_dim follow from blocks in a depth sweep
    differing.sort(key=lambda name: (not _always_said(name), name != "model.blocks"))
    kept: list[str] = []
    for name in differing:
        known = {tuple(_text(values.get(n)) for n in kept) for values in fields.values()}
        with_it = {tuple(_text(values.get(n)) for n in [*kept, name]) for values in fields.values()}
        if len(with_it) > len(known) or _always_said(name):
            kept.append(name)
    shown: dict[tuple[str, str], str] = {}
    for run in runs:
        for name in differing:  # of the same data under two names, the first one's
            shown.setdefault((name, _text(fields[run.identity].get(name))), run.field_text(name))
    labels = {
        identity: " ".join(f"{short_name(name)}={shown[name, _text(values.get(name))]}" for name in kept)
        for identity, values in fields.items()
    }
    values_of = {name: tuple(text for (field, _), text in shown.items() if field == name) for name in differing}
    return labels, tuple(values_of.items())


def _always_said(name: str) -> bool:
    return name.startswith("data.") or name in (OPTIMIZER, PARAMETERS, INIT_FROM)


def by_content(value: Any, hashes: Mapping[str, str]) -> Any:
    """Data by their content, where it is known."""
    if isinstance(value, list):
        return [by_content(item, hashes) for item in value]
    return hashes.get(value, value) if isinstance(value, str) else value


def _flat(values: Mapping[str, Any], prefix: str = "") -> Iterable[tuple[str, Any]]:
    for name, value in values.items():
        if isinstance(value, dict):
            yield from _flat(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _text(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else value if isinstance(value, str) else json.dumps(value)


def thinned(points: Sequence[tuple[int, float]], most: int = POINTS) -> list[tuple[int, float]]:
    """A curve of few points: each the mean of its part, at the part's last step."""
    size = -(-len(points) // most) or 1
    parts = [points[start : start + size] for start in range(0, len(points), size)]
    return [(part[-1][0], sum(loss for _, loss in part) / len(part)) for part in parts]
