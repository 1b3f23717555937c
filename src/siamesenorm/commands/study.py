"""``siamesenorm study``: a plan's comparison of tuned arms, run, resumed, merged and written up."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from siamesenorm.commands.findings import exit_unless, show_failed
from siamesenorm.commands.options import Engine, Jobs


def study(
    plan: Annotated[Path, typer.Argument(metavar="PLAN.yaml", help="What is asked, decided before the first run.")],
    out: Annotated[
        Path | None,
        typer.Option(
            "--out",
            "-o",
            help="Folder of the results: records, a copy of the plan, the page. The same one again goes on.",
            show_default="the plan's name beside it",
        ),
    ] = None,
    cells: Annotated[
        Path | None,
        typer.Option(help="Folder of the runs themselves, which results do not need.", show_default="runs/study-NAME"),
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Run these arms alone.", metavar="ARM")] = None,
    part: Annotated[list[str] | None, typer.Option(help="Run these parts alone.", metavar="NAME")] = None,
    merge: Annotated[
        list[Path] | None, typer.Option(help="Take in the records of another results folder.", metavar="FOLDER")
    ] = None,
    challenge: Annotated[
        str | None,
        typer.Option(
            help="Run one cell again, by its name in the records, and set both numbers side by side.", metavar="CELL"
        ),
    ] = None,
    status: Annotated[bool, typer.Option("--status", help="Say what is done and what is left; run nothing.")] = False,
    page: Annotated[bool, typer.Option("--page", help="Write results and page of what is done; run nothing.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say how many cells and how much time it would take; write nothing.")
    ] = False,
    jobs: Jobs = None,
    engine: Engine = "local",
) -> None:
    """Compare tuned arms by a plan: the same random search for each, fresh seeds for its winner, then the statistics.

    Ctrl-C stops and saves; the same command goes on. Cells with a record are never run again, whatever machine it
    comes from; an arm that is added to the plan runs alone.
    """
    from rich.console import Console

    from siamesenorm.errors import ConfigError
    from siamesenorm.lab.compare.engines import check_engine, open_engine
    from siamesenorm.lab.study.page import write_results
    from siamesenorm.lab.study.running import check_cells, merge_records, open_study, run_study
    from siamesenorm.lab.study.status import show_challenge, show_dry_run, show_status

    console = Console()
    check_engine(engine)
    if merge and (status or dry_run):
        raise ConfigError(f"--merge: is not allowed with {'--status' if status else '--dry-run'}, which writes nothing")
    opened = open_study(plan, out or plan.with_suffix(""))
    folder = cells or Path("runs") / f"study-{opened.file.plan.name}"
    check_cells(folder)
    if status or dry_run:
        show_dry_run(opened, console) if dry_run else show_status(opened, console)
        return
    if merge:
        for sentence in merge_records(opened, merge):
            typer.echo(sentence, err=True)
    if challenge is not None:
        show_challenge(opened, challenge, open_engine(engine, jobs), folder, console)
        return
    if page or merge:
        typer.echo(f"wrote {write_results(opened)}")
        return
    outcome = run_study(opened, open_engine(engine, jobs), folder, only=only or (), parts=part or (), console=console)
    show_failed(outcome.failed)
    if opened.records:
        typer.echo(f"wrote {write_results(opened)}")
    show_status(opened, console)
    exit_unless(outcome.complete, outcome.failed)
