"""A study from its plan to its records: runs what is missing, a part after the other, and keeps a line of every run.

study = open_study("docs/evidence/language.yaml", "docs/evidence/language")
run_study(study, open_engine("local", 1), cells="runs/language")
"""

from __future__ import annotations

import contextlib
import itertools
import statistics
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import BaseModel, ConfigDict, Field

from siamesenorm.data.atomic import locked_folder, whole_file, write_json
from siamesenorm.data.reading import MissingError, read_model
from siamesenorm.errors import ConfigError, DataError
from siamesenorm.lab.compare.engines import CellEngine
from siamesenorm.lab.compare.live import open_table
from siamesenorm.lab.compare.preparation import check_measured
from siamesenorm.lab.compare.runner import DONE, CellProgress, GridWatcher, plan
from siamesenorm.lab.study.cells import Stage, StudyCell, cells_of, config_of, counts_of
from siamesenorm.lab.study.plan import PlanFile, StudyPart, changes, read_plan
from siamesenorm.lab.study.record import LEDGER, Record, check_scores, merged, read_ledger, record_of, write_ledger
from siamesenorm.tasks import find_task
from siamesenorm.train.provenance import data_hashes, origin

if TYPE_CHECKING:
    from rich.console import Console

COPY, HISTORY = "plan.yaml", "history.json"
"""The plan as it was when cells were last run or taken in, and what became of it since the first one."""


class Version(BaseModel):
    """A plan that cells were run under."""

    model_config = ConfigDict(extra="forbid")

    digest: str
    when: str
    records: int
    """How many there were when it came."""
    changed: list[str] = Field(default_factory=list)
    """What it says otherwise than the one before."""
    values: dict[str, Any] = Field(default_factory=dict)
    """All that it says; kept of the last one alone."""


class History(BaseModel):
    """Every plan that cells were run under, the first one first."""

    model_config = ConfigDict(extra="forbid")

    plans: list[Version]


@dataclass
class Study:
    """A plan with the records that there are."""

    path: Path
    """Of the plan."""
    file: PlanFile
    folder: Path
    """Where records, plan and page lie."""
    records: dict[str, Record]
    history: list[Version] = field(default_factory=list)

    @property
    def changed(self) -> list[str]:
        """What the plan says otherwise than the last one that cells were run under."""
        if not self.history or self.history[-1].digest == self.file.digest:
            return []
        return changes(self.history[-1].values, self.file.values) or ["the same is written otherwise"]

    def cells(self, part: StudyPart, only: Collection[str] = ()) -> list[StudyCell]:
        """Cells of a part that can be run by now; only: those of some arms."""
        return [cell for cell in cells_of(self.file, part, self.records) if not only or cell.arm in only]

    def missing(self, part: StudyPart, only: Collection[str] = ()) -> list[StudyCell]:
        """Those of them that have no record."""
        return [cell for cell in self.cells(part, only) if cell.key not in self.records]

    @property
    def beyond(self) -> list[Record]:
        """Records of cells that the plan no longer has."""
        known = {cell.key for part in self.file.plan.parts for cell in self.cells(part)}
        return [record for key, record in self.records.items() if key not in known]

    def read_again(self) -> None:
        """Take in what another process has left in the folder since; its records come first."""
        self.records, _ = merged(read_records(self.file, self.folder), [self.records])
        self.history = read_history(self.folder) or self.history


def open_study(path: Path | str, folder: Path | str) -> Study:
    """A plan with what its results folder holds; nothing is written."""
    file, folder = read_plan(path), Path(folder)
    if folder.exists() and not folder.is_dir():
        raise ConfigError.not_allowed("--out", str(folder), "a folder")
    if folder.is_dir() and any(folder.iterdir()) and not any((folder / name).is_file() for name in (LEDGER, HISTORY)):
        raise ConfigError.not_allowed("--out", str(folder), f"a new or empty folder, or one with a study's {LEDGER}")
    search = file.plan.search
    for part in file.plan.parts:  # what is wrong with a configuration is said before any is run
        first, *others = file.plan.arms_of(part)
        for number in range(part.configurations):
            config_of(file, part, first, search.run_seed, search.draw(number))
        for arm in others:
            config_of(file, part, arm, search.run_seed, search.draw(0))
    return Study(Path(path), file, folder, read_records(file, folder), read_history(folder))


def read_records(file: PlanFile, folder: Path) -> dict[str, Record]:
    """The records of a folder by key; raises where they are not of the metric that decides in a plan."""
    plan, records = file.plan, read_ledger(folder)
    task = find_task(config_of(file, plan.parts[0], plan.baseline, plan.search.run_seed, plan.search.draw(0)).task)
    known = task.metric(plan.metric)
    check_scores(records, folder, plan.metric, None if known is None else known.higher)
    return records


def check_cells(folder: Path) -> None:
    """Raise where a folder of runs cannot be made, or is none."""
    try:
        there = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    except OSError as error:
        raise ConfigError.failed("--cells", folder, "made", error) from None
    if not there.is_dir():
        raise ConfigError.not_allowed("--cells", str(folder), "a folder")


def read_history(folder: Path) -> list[Version]:
    """Plans that cells of a results folder were run under; none where there is no such folder yet."""
    try:
        return read_model(folder / HISTORY, History, "records").plans
    except MissingError:
        return []
    except DataError as error:
        raise ConfigError(str(error)) from None


def check_data(study: Study, parts: Sequence[StudyPart]) -> dict[str, str]:
    """Open the data of some parts; raises where they are not those that the plan names. Hashes by name."""
    found: dict[str, str] = {}
    plan = study.file.plan
    for part in {part.corpus: part for part in parts}.values():
        corpus = plan.corpora[part.corpus]
        config = config_of(study.file, part, plan.baseline, plan.search.run_seed, plan.search.draw(0))
        hashes = data_hashes(config)
        for name, digest in hashes.items():
            if corpus.sha256.get(name) != digest:
                known = "no hash" if name not in corpus.sha256 else f"{corpus.sha256[name][:12]}…"
                raise ConfigError(
                    f"plan: corpora.{part.corpus}.sha256: {name!r} has {digest}, the plan {known}; "
                    "it takes the data that were planned with"
                )
        for name in corpus.sha256.keys() - hashes.keys():
            raise ConfigError(f"plan: corpora.{part.corpus}: {name!r} is not there; make it as the plan says")
        check_measured(find_task(config.task)(config), plan.metric)
        found |= hashes
    return found


@dataclass(frozen=True)
class StageProgress:
    """How far a stage of a part is."""

    part: str
    stage: Stage
    done: int
    of: int
    seconds: float | None
    """That the rest takes by what such runs have taken; None where none has been run."""


def stage_progress(study: Study) -> list[StageProgress]:
    """What is done and what is left, stage by stage."""
    found = []
    for part in study.file.plan.parts:
        cells = study.cells(part)
        for stage, of in counts_of(study.file, part).items():
            done = sum(cell.stage == stage and cell.key in study.records for cell in cells)
            seconds = _seconds_each(study, part)
            found.append(StageProgress(part.name, stage, done, of, None if seconds is None else seconds * (of - done)))
    return found


def _seconds_each(study: Study, part: StudyPart) -> float | None:
    """Processor seconds of a run of a part, or of its size elsewhere."""
    runs = [record for record in study.records.values() if record.size == part.size and record.processor_seconds]
    near = [record for record in runs if record.place == part.place] or runs
    return statistics.fmean(record.processor_seconds or 0.0 for record in near) if near else None


class LedgerWriter(GridWatcher):
    """Keeps the record of every cell that ends, while another watcher shows the cells."""

    def __init__(self, study: Study, shown: GridWatcher) -> None:
        self.study, self.shown = study, shown

    def changed(self, progress: CellProgress) -> None:
        """Write the ledger anew when a cell has ended."""
        self.shown.changed(progress)
        if progress.state in DONE:
            self.keep(progress)

    def keep(self, progress: CellProgress) -> None:
        """The record of one cell, once."""
        cell, plan = progress.cell, self.study.file.plan
        assert isinstance(cell, StudyCell)
        if cell.key not in self.study.records:
            self.study.records[cell.key] = record_of(cell, progress.folder, plan.metric, self.study.file.digest)
            with writing(self.study.folder):
                write_ledger(self.study.folder, self.study.records)

    def tick(self) -> None:
        """Some time has passed."""
        self.shown.tick()


@dataclass
class Outcome:
    """How a call of `run_study` ended."""

    complete: bool
    """Whether nobody stopped it."""
    failed: list[CellProgress] = field(default_factory=list)


def run_study(
    study: Study,
    engine: CellEngine,
    cells: Path | str,
    *,
    only: Collection[str] = (),
    parts: Collection[str] = (),
    console: Console | None = None,
) -> Outcome:
    """Run what has no record yet, in the order of the plan; an interruption saves what is running.

    cells: folder of the runs themselves, which are no part of the results.
    only, parts: names of arms and parts, where not all are to be run.
    """
    plan_now = study.file.plan
    for option, names, known in (
        ("--only", only, plan_now.arms),
        ("--part", parts, {part.name: part for part in plan_now.parts}),
    ):
        for name in names:
            if name not in known:
                raise ConfigError(f"{option}: {name!r} is not in the plan; it takes one of {', '.join(known)}")
    chosen = [part for part in plan_now.parts if not parts or part.name in parts]
    waiting = [part for part in chosen if study.missing(part, only)]
    provenance = {**origin(), "data": check_data(study, waiting)}
    outcome = Outcome(complete=True)
    if console is not None:
        for sentence in study.changed:
            console.print(f"The plan was changed: {sentence}.", style="dim", markup=False)
    with begun(study):
        for part in waiting:
            tried: set[str] = set()
            while missing := [cell for cell in study.missing(part, only) if cell.key not in tried]:
                search = [cell for cell in missing if cell.stage == "search"]
                wave = search or missing  # all searches first, so that arms stay equally far
                tried |= {cell.key for cell in wave}
                outcome.complete, places = _run_wave(study, engine, wave, Path(cells), provenance, console)
                outcome.failed += [place for place in places if place.state == "failed"]
                if not outcome.complete:
                    return outcome
    return outcome


def _run_wave(
    study: Study,
    engine: CellEngine,
    wave: Sequence[StudyCell],
    cells: Path,
    provenance: dict[str, Any],
    console: Console | None,
) -> tuple[bool, list[CellProgress]]:
    """Run some cells; whether nobody stopped it, and how each ended."""
    places = plan(wave, cells)
    if console is not None:
        text = f"{wave[0].part}: {len(wave)} cells, {engine.jobs} at a time"
        console.print(text, style="dim", markup=False)
    with open_table(places, console) as shown:
        writer = LedgerWriter(study, shown)
        for place in places:
            if place.state in DONE:  # run before, and the record was lost
                writer.keep(place)
        complete = engine.run(places, provenance, writer)
    for place in places:  # a last word may have come with the end of a process
        if place.state in DONE:
            writer.keep(place)
    return complete, places


@contextlib.contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Say in one sentence that a results folder cannot be written; around the writing alone."""
    try:
        yield
    except OSError as error:
        raise ConfigError.failed("--out", folder, "written", error) from None


@contextlib.contextmanager
def begun(study: Study) -> Iterator[None]:
    """Keep others out of the results, take in what they left, and record the plan and what was changed."""
    folder, file = study.folder, study.file
    with contextlib.ExitStack() as held:
        with writing(folder):
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(locked_folder(folder, "--out: another study"))
        study.read_again()
        if not study.history or study.history[-1].digest != file.digest:
            version = Version(
                digest=file.digest,
                when=datetime.now(UTC).strftime("%Y-%m-%dT%H:%MZ"),
                records=len(study.records),
                changed=study.changed,
                values=file.values,
            )
            earlier = [known.model_copy(update={"values": {}}) for known in study.history]
            study.history = [*earlier, version]
            with writing(folder):
                write_json(folder / HISTORY, History(plans=study.history).model_dump(mode="json"))
                with whole_file(folder / COPY) as copy:
                    copy.write(file.text)
        yield


def merge_records(study: Study, folders: Sequence[Path]) -> list[str]:
    """Take in the records of other results folders, each cell once; sentences about what came of it."""
    ledgers = []
    for folder in folders:
        if not (folder / LEDGER).is_file():
            raise ConfigError(f"--merge: {str(folder)!r} has no {LEDGER}; it takes the results folder of a study")
        ledgers.append(read_records(study.file, folder))
    with begun(study):
        before = len(study.records)
        study.records, conflicts = merged(study.records, ledgers)
        with writing(study.folder):
            write_ledger(study.folder, study.records)
    return [f"{len(study.records) - before} records were taken in, {len(study.records)} are there now", *conflicts]


def challenge(
    study: Study, cell: StudyCell, engine: CellEngine, cells: Path | str, console: Console | None = None
) -> tuple[Record | None, Record | None]:
    """Run one cell again, apart from the study's records; what is on record of it, and what came of it now.

    Every challenge is a run of its own; one that was stopped goes on.
    """
    part = next(part for part in study.file.plan.parts if part.name == cell.part)
    provenance = {**origin(), "data": check_data(study, [part])}
    place = _unfinished(cell, Path(cells) / "challenges")
    with open_table([place], console) as shown:
        engine.run([place], provenance, shown)
    known = study.records.get(cell.key)
    if place.state == "failed":
        raise ConfigError(f"--challenge: {cell.title!r} failed: {place.message}")
    if place.state not in DONE:
        return known, None
    return known, record_of(cell, place.folder, study.file.plan.metric, study.file.digest)


def _unfinished(cell: StudyCell, folder: Path) -> CellProgress:
    """The first numbered folder that has no finished run of a cell."""
    for number in itertools.count(1):
        (place,) = plan([cell], folder / str(number))
        if place.state not in DONE:
            return place
    raise AssertionError("counting ends nowhere")
