"""What finished runs say: shown on the terminal and written into a folder, by ``compare`` and ``report`` alike."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import typer

if TYPE_CHECKING:
    from siamesenorm.lab.report.outcome import Comparison

EXIT_FAILED = 1


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
