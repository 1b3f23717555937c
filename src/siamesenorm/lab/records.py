"""Finished runs as the laboratory looks at them: from any folders, of any machine, each once."""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from siamesenorm.data.listing import walk
from siamesenorm.lab.cell import read_facts
from siamesenorm.lab.grid import GRID, OWN_OPTIONS, OnAxes
from siamesenorm.train.config import RunConfig
from siamesenorm.train.divergence import LEARNT
from siamesenorm.train.errors import ConfigError
from siamesenorm.train.folder import CONFIG, RunFolder, read_metrics

UNCOUNTED = ("every", "at_once", "lm_eval")
"""Fields of the evaluation that decide when and how it runs, and no number that runs are compared by."""
HIGHER_IS_BETTER = ("accuracy", "top1", "top5", "arithmetic", "inception_score")
POINTS = 200
"""Points of a loss curve in a report; each is the mean of what lies between it and the one before."""
CHANCE = 0.1
"""Nats below the loss of knowing only frequencies that a run must reach to have learnt something."""


@dataclass(frozen=True)
class Run(OnAxes):
    """One run and how it ended."""

    name: str
    folder: Path
    config: RunConfig
    state: str
    """finished, diverged, stuck (at the end it knows frequencies only and learns no more), or where it stopped."""
    step: int
    evaluation: dict[str, float]
    curve: list[tuple[int, float]]
    """Step and training loss."""
    evaluations: list[tuple[int, dict[str, float]]]
    step_seconds: float | None
    """Median."""
    message: str = ""
    facts: dict[str, Any] = field(default_factory=dict)

    @functools.cached_property
    def identity(self) -> str:
        """The same for the same run on any machine: data count by their hashes, not by where they lie."""
        return hashlib.sha256(json.dumps(self.fields, sort_keys=True).encode()).hexdigest()[:16]

    @property
    def fields(self) -> dict[str, Any]:
        """Every field that decides the run, by dotted name, corpora by their hashes where these are known."""
        values, hashes = self.config.decisive(), self.facts.get("data", {})
        values["data"] = {name: _hashed(value, hashes) for name, value in values["data"].items()}
        evaluation = self.config.as_dict()["evaluation"].items()
        values["evaluation"] = {name: value for name, value in evaluation if name not in UNCOUNTED}
        return dict(_flat(values))

    def score(self, metric: str) -> float | None:
        """Its last held-out number of a name, if it reached its end."""
        return self.evaluation.get(metric) if self.state == "finished" else None


@dataclass(frozen=True)
class Records:
    """Runs with what tells them apart beside topology, learning rate and seed."""

    runs: tuple[Run, ...]
    settings: dict[str, str]
    """By identity: ``blocks=6``, or nothing where all runs agree."""
    unfinished: tuple[str, ...] = ()
    duplicates: tuple[tuple[str, float | None], ...] = ()
    """Runs that were there before, and how far their losses lie apart."""

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


def read_grid(folder: Path) -> dict[str, Any]:
    """What grid.json says, nothing if it is not there."""
    try:
        read = json.loads((folder / GRID).read_bytes())
    except (OSError, ValueError):
        return {}
    return read if isinstance(read, dict) and isinstance(read.get("cells"), list) else {}


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
    evaluations = [(r["step"], r["evaluation"]) for r in metrics if isinstance(r.get("evaluation"), dict)]
    evaluation = status.get("evaluation") or (evaluations[-1][1] if evaluations else {})
    state, chance = str(status.get("state", "unknown")), facts.get("chance_loss")
    if state == "finished" and chance is not None and _stuck([loss for _, loss in losses], chance):
        state = "stuck"
    return Run(
        name=folder.name,
        folder=folder,
        config=config,
        state=state,
        step=int(status.get("step") or 0),
        evaluation=evaluation,
        curve=thinned(losses),
        evaluations=evaluations,
        step_seconds=seconds[len(seconds) // 2] if seconds else None,
        message=str(status.get("message", "")),
        facts=facts,
    )


def _stuck(losses: Sequence[float], chance: float) -> bool:
    """Whether the last quarter of a run knows no more than frequencies and gained nothing on the one before."""
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
    return Records(tuple(runs.values()), _settings(list(runs.values())), tuple(unfinished), tuple(duplicates))


def _settings(runs: Sequence[Run]) -> dict[str, str]:
    """A label of the fields that differ, without those that follow from others."""
    fields = {run.identity: run.fields for run in runs}
    names = dict.fromkeys(name for values in fields.values() for name in values)
    differing = [n for n in names if n not in OWN_OPTIONS and len({_text(v.get(n)) for v in fields.values()}) > 1]
    differing.sort(key=lambda name: name != "model.blocks")  # dim and ffn_dim follow from it in a depth sweep
    kept: list[str] = []
    for name in differing:
        known = {tuple(_text(values.get(n)) for n in kept) for values in fields.values()}
        with_it = {tuple(_text(values.get(n)) for n in [*kept, name]) for values in fields.values()}
        if len(with_it) > len(known):
            kept.append(name)
    return {
        identity: " ".join(f"{name.rpartition('.')[2]}={_text(values.get(name))}" for name in kept)
        for identity, values in fields.items()
    }


def _hashed(value: Any, hashes: Mapping[str, str]) -> Any:
    """Data by their content, where it is known."""
    if isinstance(value, list):
        return [_hashed(item, hashes) for item in value]
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
