"""``siamesenorm report``: a report of any finished runs, of one grid or of several, from one machine or many."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from siamesenorm.lab.presets import Preset

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
    from siamesenorm.lab.export import parse_formats
    from siamesenorm.lab.presets import PRESETS
    from siamesenorm.lab.records import find_runs, read_grid

    formats = () if figures is None else parse_formats(figures)
    folder = out or (runs[0] if len(runs) == 1 else Path("runs") / "report")
    names = {read_grid(path).get("preset") for path in runs}
    (name,) = names if len(names) == 1 else (None,)
    make_report(
        find_runs(runs),
        folder,
        prefer="" if any(read_grid(path) for path in runs) else "pre",
        title=title,
        metric=metric,
        baseline=baseline,
        preset=PRESETS.get(name or ""),
        formats=formats,
        show=show,
    )


def make_report(
    runs: Sequence[Path],
    folder: Path,
    *,
    prefer: str = "",
    title: str = "",
    metric: str | None = None,
    baseline: str | None = None,
    preset: Preset | None = None,
    formats: Sequence[str] = (),
    show: bool = False,
) -> None:
    """Say what the runs say on the terminal, and write it into a folder.

    prefer: the baseline where none is asked for, if it is among the runs.
    """
    from rich.console import Console

    from siamesenorm.lab.export import export_figures
    from siamesenorm.lab.published import show_published
    from siamesenorm.lab.records import read_records
    from siamesenorm.lab.report import write_report
    from siamesenorm.lab.statistics import analyse
    from siamesenorm.lab.tables import show as show_tables

    records = read_records(runs)
    baseline = baseline or (prefer if prefer in records.topologies else None)
    analysis = analyse(records, metric=metric, baseline=baseline)
    console = Console()
    show_tables(console, records, analysis)
    if preset is not None:
        show_published(console, analysis, preset)
    try:
        page = write_report(records, analysis, folder, title=title, preset=preset)
        drawn = export_figures(records, analysis, folder, formats) if formats else []
    except OSError as error:
        typer.echo(f"siamesenorm: {folder}: {error.strerror or error}", err=True)
        raise typer.Exit(EXIT_FAILED) from None
    for path in (page, *drawn):
        typer.echo(path)
    if show:
        typer.launch(str(page))
