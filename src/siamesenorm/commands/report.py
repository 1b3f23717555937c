"""``siamesenorm report``: a report of any finished runs, of one grid or of several, from one machine or many."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from siamesenorm.lab.outcome import Comparison

EXIT_FAILED = 1

Metric = Annotated[str | None, typer.Option(help="Held-out number to compare by.", metavar="NAME", show_default="loss")]
Baseline = Annotated[
    str | None,
    typer.Option(help="Topology to compare the others with.", metavar="NAME", show_default="the first one, or pre"),
]
Figures = Annotated[
    str | None,
    typer.Option(
        help="Draw the plots for a paper too: png, svg, pdf (extra: plot).", metavar="FORMAT,…", show_default=False
    ),
]
Open = Annotated[bool, typer.Option("--open", help="Show the report in a browser.")]


def report(
    runs: Annotated[
        list[Path],
        typer.Argument(metavar="RUN…", help="Folders of runs or of grids; each run counts once.", show_default=False),
    ],
    out: Annotated[
        Path | None, typer.Option(help="Folder for the report; by default the one given.", show_default=False)
    ] = None,
    title: Annotated[str, typer.Option(help="Heading of the report.", show_default=False)] = "",
    metric: Metric = None,
    baseline: Baseline = None,
    figures: Figures = None,
    show: Open = False,
) -> None:
    """Write the report of finished runs again, or one of several grids together."""
    from siamesenorm.lab.comparison import read_report
    from siamesenorm.lab.export import parse_formats

    formats = () if figures is None else parse_formats(figures)
    show_result(read_report(runs, out, title=title, metric=metric, baseline=baseline), formats=formats, show=show)


def show_result(found: Comparison, *, formats: Sequence[str] = (), show: bool = False) -> None:
    """Say what the runs say on the terminal, and write it into its folder."""
    from rich.console import Console

    from siamesenorm.lab.export import export_figures
    from siamesenorm.lab.published import show_published
    from siamesenorm.lab.tables import show as show_tables

    console = Console()
    show_tables(console, found.records, found.analysis)
    if found.preset is not None:
        show_published(console, found.analysis, found.preset)
    try:
        page = found.write()
        drawn = export_figures(found.records, found.analysis, found.folder, formats) if formats else []
    except OSError as error:
        typer.echo(f"siamesenorm: {found.folder}: {error.strerror or error}", err=True)
        raise typer.Exit(EXIT_FAILED) from None
    for path in (page, *drawn):
        typer.echo(path)
    if show:
        typer.launch(str(page))
