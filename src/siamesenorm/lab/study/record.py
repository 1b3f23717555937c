"""What is kept of a run of a study: a line of JSON, enough to compute every figure again without the run itself.

records = read_ledger(folder)          # by key
write_ledger(folder, records)
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from siamesenorm.data.atomic import whole_file
from siamesenorm.data.reading import MissingError, first_of, parse_json, read_text
from siamesenorm.errors import ConfigError
from siamesenorm.lab.inspection.spikes import find_spikes
from siamesenorm.lab.report.records import Run, read_run, thinned
from siamesenorm.lab.report.statistics import WORST
from siamesenorm.train.folder import WEIGHTS, read_metrics

if TYPE_CHECKING:
    from siamesenorm.lab.study.cells import StudyCell

LEDGER = "records.jsonl"
POINTS = 20
"""Of a training curve."""
TAIL = 99.9
"""Percentile of gradient norms."""
FIRST = 100
"""Steps in which no spikes are counted: half a window."""
DIGITS = 6
PLACE = ("corpus", "size", "optimizer", "arm", "topology", "stage", "number", "seed", "lr", "drawn", "factor")
"""Fields of a record that say where it stands in the plan, as fields of a cell do."""
LOOKED_AT = 1024
"""Tokens in which the largest activation is looked for."""
PLAN_DIGITS = 12
"""Of the hash of a plan."""


class Record(BaseModel):
    """One run: where it stands in the plan, how it ended, what it cost."""

    model_config = ConfigDict(frozen=True, extra="forbid", strict=True, allow_inf_nan=False)

    key: str = Field(pattern=r"^[0-9a-f]{16}$")
    cell: str
    corpus: str
    size: str
    optimizer: str
    arm: str
    topology: str
    stage: str
    number: int
    seed: int
    lr: float
    drawn: dict[str, Any]
    factor: float | None = None
    state: str
    step: int
    steps: int
    score: float | None
    """The metric that decides, if the run reached its end."""
    higher: bool
    """Whether more of it is better."""
    evaluation: dict[str, float | None]
    chance: float | None
    first_loss: float | None
    curve: list[tuple[int, float]]
    spikes: float | None
    """Per 10,000 steps, by the rule of 201, of those behind the first hundred, where every loss still falls."""
    grad_tail: float | None
    """99.9th percentile of gradient norms."""
    activation: float | None = None
    """Largest activation of any stream, after a stress that reached its end."""
    parameters: int
    samples: int
    """Tokens, or images, that it was trained on."""
    step_seconds: float | None
    processor_seconds: float | None
    memory_bytes: float | None
    plan: str
    """The first digits of the hash of the plan it was run under."""
    versions: dict[str, str]
    machine: str
    threads: int | None = None
    data: dict[str, str]
    when: str

    @property
    def done(self) -> bool:
        """Whether it has a number."""
        return self.score is not None

    @property
    def rank(self) -> tuple[int, float]:
        """Less is better; runs without a number behind all others, by how far they came."""
        if self.score is None:
            return 1, -float(self.step)
        return 0, -self.score if self.higher else self.score

    @property
    def place(self) -> tuple[str, str, str]:
        """Corpus, size and optimiser."""
        return self.corpus, self.size, self.optimizer

    @property
    def step_cost(self) -> float | None:
        """Processor seconds per step, of a run that reached its end."""
        return self.processor_seconds / self.step if self.processor_seconds and self.step == self.steps else None

    @property
    def timed_on(self) -> str:
        """What times are compared on alone: machine, versions and threads."""
        versions = [f"{name} {version}" for name, version in sorted(self.versions.items())]
        threads = [] if self.threads is None else [f"{self.threads} threads"]
        return ", ".join([self.machine, *versions, *threads])


def record_of(cell: StudyCell, folder: Path, metric: str, plan: str) -> Record:
    """The record of a finished or diverged run."""
    run, lines = read_run(folder), read_metrics(folder)
    losses = [(line["step"], line.get("loss")) for line in lines if "loss" in line]
    norms = [line["grad_norm"] for line in lines if isinstance(line.get("grad_norm"), (int, float))]
    finite = [norm for norm in norms if math.isfinite(norm)]
    score = run.score(metric)
    score = score if score is not None and math.isfinite(score) else None
    return Record(
        key=cell.key,
        **_place_of(cell),
        state=run.state if score is not None or run.state in WORST else "diverged",
        step=run.step,
        steps=cell.config.steps,
        score=_short(score),
        higher=bool(run.higher_is_better(metric)),
        evaluation={name: _short(value) for name, value in run.evaluation.items()},
        chance=_short(run.chance_loss),
        first_loss=_short(losses[0][1]) if losses else None,
        curve=[(step, float(f"{loss:.5g}")) for step, loss in thinned(run.curve, POINTS) if math.isfinite(loss)],
        spikes=_short(spikes_of([loss for _, loss in losses])),
        grad_tail=_short(float(np.percentile(finite, TAIL))) if finite else None,
        activation=_short(largest_activation(folder)) if cell.stage == "stress" else None,
        parameters=int(run.parameters.get("of", 0)),
        samples=run.step * cell.config.train.batch_size * cell.config.sample_tokens,
        step_seconds=_short(run.step_seconds),
        processor_seconds=run.facts.get("processor_seconds"),
        memory_bytes=run.facts.get("memory_bytes"),
        plan=plan[:PLAN_DIGITS],
        versions={
            name: text for name, text in run.facts.get("versions", {}).items() if name in ("siamesenorm", "torch")
        },
        machine=str(run.facts.get("machine", {}).get("processor", "")),
        threads=threads if isinstance(threads := run.facts.get("threads"), int) else None,
        data={Path(name).name if "/" in name else name: digest[:12] for name, digest in _data(run).items()},
        when=datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
    )


def placed(record: Record, cell: StudyCell) -> Record:
    """A record where the plan has its cell by now: the key says what was run, the plan what it is called and is for."""
    return record.model_copy(update=_place_of(cell))


def _place_of(cell: StudyCell) -> dict[str, Any]:
    return {"cell": cell.title, **{name: getattr(cell, name) for name in PLACE}}


def spikes_of(losses: Sequence[float | None]) -> float | None:
    """Spikes per 10,000 steps behind the first ones; None where there are no others."""
    counted = len(losses) - FIRST
    if counted < 1:
        return None
    return 10_000 * sum(step > FIRST for step in find_spikes(losses).steps) / counted


def _data(run: Run) -> dict[str, str]:
    values = run.config.as_dict()["data"].values()
    named = {item for value in values for item in (value if isinstance(value, list) else [value])}
    return {name: digest for name, digest in run.facts.get("data", {}).items() if name in named}


def _short(value: float | None) -> float | None:
    return None if value is None or not math.isfinite(value) else float(f"{value:.{DIGITS}g}")


def largest_activation(folder: Path) -> float | None:
    """Of any stream at any depth, on what the run is validated on; None where it left no weights."""
    if not (folder / WEIGHTS).is_file():
        return None
    from siamesenorm.lab.inspection.looking import inspect

    peaks = inspect(folder, removal=False, tokens=LOOKED_AT).peaks.values()
    sizes = [peak.largest for depths in peaks for peak in depths if peak is not None and peak.largest is not None]
    return max(sizes, default=None)


# The ledger ------------------------------------------------------------------------------------------------


def read_ledger(folder: Path) -> dict[str, Record]:
    """Records of a results folder by key, in the order they were written; nothing where there is none yet."""
    try:
        text = read_text(folder / LEDGER, "records")
    except MissingError:
        return {}
    found: dict[str, Record] = {}
    first: dict[str, int] = {}
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        try:
            record = Record.model_validate(parse_json(line), strict=False)
        except ValidationError as error:
            raise ConfigError(f"records: {str(folder / LEDGER)!r}, line {number}: {first_of(error)}") from None
        except ValueError as error:
            raise ConfigError(f"records: {str(folder / LEDGER)!r}, line {number}: is no JSON: {error}") from None
        if found.setdefault(record.key, record) != record:
            raise ConfigError(
                f"records: {str(folder / LEDGER)!r}, lines {first[record.key]} and {number}: both are {record.cell!r} "
                f"and say different things ({_said(found[record.key])}, {_said(record)}); it takes one record of a run"
            )
        first.setdefault(record.key, number)
    return found


def check_scores(records: Mapping[str, Record], folder: Path, metric: str, higher: bool | None) -> None:
    """Raise where a score is not the plan's metric, or points the other way; higher: whether more of it is better."""
    for record in records.values():
        if record.score is None:
            continue
        where, measured = f"records: {str(folder / LEDGER)!r}, {record.cell!r}", record.evaluation.get(metric)
        if measured != record.score:
            theirs = "which it has not" if measured is None else f"{measured:g}"
            raise ConfigError(
                f"{where}: score = {record.score:g} is not its {metric}, {theirs}; it takes the number that decides "
                "in the plan, and a plan with another metric takes a new --out"
            )
        if higher is not None and record.higher != higher:
            raise ConfigError.not_allowed(f"{where}: higher", record.higher, f"{higher}, as {metric} has it")


def write_ledger(folder: Path, records: Mapping[str, Record]) -> None:
    """All of them, whole or not at all."""
    lines = (json.dumps(record.model_dump(mode="json"), ensure_ascii=False) for record in records.values())
    with whole_file(folder / LEDGER) as file:
        file.write("".join(f"{line}\n" for line in lines).encode())


def merged(one: Mapping[str, Record], others: Iterable[Mapping[str, Record]]) -> tuple[dict[str, Record], list[str]]:
    """Records of several machines, each cell once; and a sentence for each that two have with different numbers."""
    found, conflicts = dict(one), []
    for other in others:
        for key, record in other.items():
            mine = found.setdefault(key, record)
            if mine is not record and mine.score != record.score:
                conflicts.append(f"{record.cell}: {_said(mine)} here, {_said(record)} there; the first one counts")
    return found, conflicts


def _said(record: Record) -> str:
    return record.state if record.score is None else f"{record.score:g}"
