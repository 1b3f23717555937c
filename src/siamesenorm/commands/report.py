"""``siamesenorm report``: a report of any finished runs, of one grid or of several, from one machine or many."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from siamesenorm.commands.findings import show_findings
from siamesenorm.commands.options import Baseline, Figures, Metric, Open


def report(
    runs: Annotated[
        list[Path], typer.Argument(metavar="RUN…", help="Folders of runs or of grids; each run counts once.")
    ],
    out: Annotated[Path | None, typer.Option(help="Folder for the report; by default the one given.")] = None,
    title: Annotated[str, typer.Option(help="Heading of the report.", show_default=False)] = "",
    metric: Metric = None,
    baseline: Baseline = None,
    figures: Figures = None,
    show: Open = False,
) -> None:
    """Write the report of finished runs again, or one of several grids together."""
    from siamesenorm.lab.report.outcome import read_report
    from siamesenorm.lab.report.paper_figures import parse_formats

    formats = () if figures is None else parse_formats(figures)
    show_findings(read_report(runs, out, title=title, metric=metric, baseline=baseline), formats=formats, browser=show)
