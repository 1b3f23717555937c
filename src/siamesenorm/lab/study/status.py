"""What is said of a study on a terminal: how far it is, what it would take, and how a repeated cell compares."""

from __future__ import annotations

from pathlib import Path

from rich.console import Console
from rich.text import Text

from siamesenorm.errors import ConfigError
from siamesenorm.lab.compare.engines import CellEngine
from siamesenorm.lab.study.cells import config_of, counts_of, find_cell
from siamesenorm.lab.study.record import Record
from siamesenorm.lab.study.running import Study, challenge, stage_progress
from siamesenorm.terminal import plain_table
from siamesenorm.train.display import clock
from siamesenorm.train.dry_run import estimate


def show_status(study: Study, console: Console) -> None:
    """Parts and stages with cells done, cells in all, and the time that is left."""
    table = plain_table("part", "stage", "done", "of", "left", words=2)
    rows = stage_progress(study)
    for row in rows:
        rest = "" if row.done == row.of else "?" if row.seconds is None else clock(row.seconds)
        table.add_row(Text(row.part), row.stage, str(row.done), str(row.of), rest)
    console.print(table)
    done, of = sum(row.done for row in rows), sum(row.of for row in rows)
    known, unknown = [row.seconds for row in rows if row.seconds is not None], any(row.seconds is None for row in rows)
    time = f"about {clock(sum(known))} of one processor are left" if known else "how long they take is not known yet"
    more = ", and parts of sizes that have not been run yet" if known and unknown else ""
    console.print(f"{done} of {of} cells have a record; {time}{more}.", markup=False, soft_wrap=True)
    for sentence in study.changed:
        console.print(f"The plan was changed since cells were last run: {sentence}.", markup=False, soft_wrap=True)
    if study.beyond:
        console.print(f"{len(study.beyond)} records are of cells that the plan no longer has.", markup=False)


def show_dry_run(study: Study, console: Console) -> None:
    """Time a few steps of the baseline at each size; nothing is written."""
    plan, total = study.file.plan, 0.0
    table = plain_table("part", "cells", "parameters", "steps", "ms per step", "minutes")
    found = {}
    for part in plan.parts:
        if (part.size, part.optimizer) not in found:
            config = config_of(study.file, part, plan.baseline, plan.search.run_seed, plan.search.draw(0))
            found[part.size, part.optimizer] = estimate(config)
        one = found[part.size, part.optimizer]
        recorded = sum(cell.key in study.records for cell in study.cells(part))
        count = sum(counts_of(study.file, part).values()) - recorded
        total += count * one.seconds
        numbers = (str(count), f"{one.parameters:,}", f"{one.steps:,}", f"{1000 * one.step_seconds:.3g}")
        table.add_row(Text(part.name), *numbers, f"{count * one.seconds / 60:.1f}")
    console.print(table)
    console.print(
        f"About {clock(total)} if every arm were as fast as {plan.baseline}, one cell at a time, without evaluations. "
        "Nothing was written.",
        markup=False,
        soft_wrap=True,
    )


def show_challenge(study: Study, title: str, engine: CellEngine, cells: Path, console: Console) -> None:
    """Run a cell again and set what came of it beside what is on record."""
    cell = find_cell(study.file, study.records, title)
    known, now = challenge(study, cell, engine, cells, console)
    if now is None:
        raise ConfigError(f"--challenge: {title!r} was not run to its end; the same command goes on")
    table = plain_table("", "on record", "now", words=2)
    for name, get in (
        ("state", lambda r: r.state),
        (study.file.plan.metric, lambda r: "–" if r.score is None else f"{r.score:.6g}"),
        ("processor seconds", lambda r: f"{r.processor_seconds or 0:.1f}"),
        ("machine", lambda r: r.machine),
        ("versions", lambda r: ", ".join(f"{n} {v}" for n, v in r.versions.items())),
    ):
        table.add_row(name, Text("–" if known is None else get(known)), Text(get(now)))
    console.print(table)
    console.print(_sentence(known, now), markup=False, soft_wrap=True)
    console.print_json(now.model_dump_json())


def _sentence(known: Record | None, now: Record) -> str:
    if known is None:
        return "There is no record of this cell yet; the line below is what one would be."
    if known.score is None or now.score is None:
        same = known.state == now.state
        return f"Both ended {now.state}." if same else f"It ended {known.state} then and {now.state} now."
    return f"The difference is {now.score - known.score:+.3g}; the line below is the new record."
