"""The end of ``compare``, ``report`` and ``study``: findings on the terminal and in a folder, cells that failed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

from siamesenorm.interrupts import EXIT_INTERRUPTED
from siamesenorm.refusal import EXIT_FAILED

if TYPE_CHECKING:
    from siamesenorm.lab.compare.runner import CellProgress
    from siamesenorm.lab.report.outcome import Comparison

MOST_FAILED = 5
"""Failed cells that are named."""


def show_findings(found: Comparison, *, formats: Sequence[str] = (), browser: bool = False) -> None:
    """Say what the runs say on the terminal, and write it into its folder."""
    from rich.console import Console

    from siamesenorm.lab.report.paper_figures import export_figures
    from siamesenorm.lab.report.terminal import show

    show(Console(), found)
    try:
        page = found.write()
        drawn = export_figures(found, formats) if formats else []
    except OSError as error:
        typer.echo(f"siamesenorm: {found.folder}: {error.strerror or error}", err=True)
        raise typer.Exit(EXIT_FAILED) from None
    for path in (page, *drawn):
        typer.echo(path)
    if browser:
        typer.launch(str(page))


def show_failed(failed: Sequence[CellProgress]) -> None:
    """Name the first cells that failed, and why."""
    for cell in failed[:MOST_FAILED]:
        typer.echo(f"siamesenorm: {cell.folder}: {cell.message}", err=True)


def exit_unless(complete: bool, failed: Sequence[CellProgress]) -> None:
    """End with the exit code of an interruption or a failure, where there was one."""
    if not complete:
        typer.echo("interrupted and saved; the same command goes on from here", err=True)
        raise typer.Exit(EXIT_INTERRUPTED)
    if failed:
        raise typer.Exit(EXIT_FAILED)
