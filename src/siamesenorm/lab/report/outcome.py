"""What finished runs say, as a value of Python: verdict, table, figures, and itself in a notebook or a browser."""

from __future__ import annotations

import importlib
import importlib.util
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from siamesenorm.lab.compare.presets import PRESETS, GridPreset
from siamesenorm.lab.drawing.page import as_figures, escape, html_table
from siamesenorm.lab.report.files import HTML, run_row, write_report
from siamesenorm.lab.report.findings import Findings
from siamesenorm.lab.report.page import make_page
from siamesenorm.lab.report.records import find_runs, read_grid, read_records
from siamesenorm.lab.report.sentences import notes, score_rows, what_is_shown
from siamesenorm.lab.report.statistics import analyse

FOLDER = Path("runs") / "report"
"""Where a report of several folders goes."""


@dataclass(frozen=True, repr=False)
class Comparison(Findings):
    """Finished runs and what they say of their topologies."""

    complete: bool = True
    """Whether every run that was asked for has ended; False after Ctrl-C."""
    failed: tuple[str, ...] = field(default=())
    """Runs that could not be made, and why."""

    @property
    def verdict(self) -> str:
        """What the runs say, one sentence per line."""
        return "\n".join(self.sentences)

    @property
    def rows(self) -> list[dict[str, Any]]:
        """Every run with its numbers."""
        return [run_row(run, self.records, self.folder) for run in self.records.runs]

    @property
    def table(self) -> Any:
        """Every run with its numbers: a frame of pandas where that is installed, a list of dictionaries elsewhere."""
        if importlib.util.find_spec("pandas") is None:
            return self.rows
        return importlib.import_module("pandas").DataFrame(self.rows)

    @property
    def figures(self) -> dict[str, Any]:
        """The plots of the report by name: figures of plotly, which show themselves in a notebook."""
        return as_figures(make_page(self).figures)

    @property
    def page(self) -> Path:
        """The report."""
        return self.folder / HTML

    def write(self) -> Path:
        """Write report.html, report.json and report.csv; the page's path is returned."""
        return write_report(self)

    def open(self) -> None:
        """Show the report in a browser."""
        if not self.page.is_file():
            self.write()
        webbrowser.open(self.page.resolve().as_uri())

    def __repr__(self) -> str:
        return f"{self.verdict}\n{self.page}"

    def _repr_html_(self) -> str:
        """The verdict and the table of topologies by learning rates, for notebooks."""
        items = "".join(f"<li>{escape(sentence)}</li>" for sentence in self.sentences)
        words = [*notes(self.records), *self.failed, *([] if self.complete else ["interrupted; the same call goes on"])]
        remarks = "".join(f"<p><em>{escape(note)}</em></p>" for note in words)
        table = html_table(*score_rows(self.records, self.analysis), what_is_shown(self.analysis))
        return f"<ul>{items}</ul>{remarks}{table}<p><code>{escape(self.page)}</code></p>"


def report(
    runs: Path | str | Sequence[Path | str],
    *,
    folder: Path | str | None = None,
    title: str = "",
    metric: str | None = None,
    baseline: str | None = None,
) -> Comparison:
    """Read finished runs, of one grid or of several, of `train` or of `record`, and write their report.

    ::

        siamesenorm.report("runs/compare").open()

    runs: folders of runs, or folders that hold some; each run counts once.
    folder: where report.html, report.json and report.csv go; by default the one given, or runs/report.
    """
    result = read_report(runs, folder, title=title, metric=metric, baseline=baseline)
    result.write()
    return result


def read_report(
    runs: Path | str | Sequence[Path | str],
    folder: Path | str | None = None,
    *,
    title: str = "",
    metric: str | None = None,
    baseline: str | None = None,
) -> Comparison:
    """What finished runs say; nothing is written yet. Arguments as of `report`."""
    paths = [Path(path) for path in ([runs] if isinstance(runs, (str, Path)) else runs)]
    out = Path(folder) if folder is not None else paths[0] if len(paths) == 1 else FOLDER
    grids = [read_grid(path) for path in paths]
    presets = {grid.get("preset") for grid in grids}
    preset = PRESETS.get(presets.pop() or "") if len(presets) == 1 else None
    found = find_runs(paths)
    prefer = "" if any(grids) else "pre"
    return read_comparison(found, out, prefer=prefer, title=title, metric=metric, baseline=baseline, preset=preset)


def read_comparison(
    runs: Sequence[Path],
    folder: Path,
    *,
    prefer: str = "",
    title: str = "",
    metric: str | None = None,
    baseline: str | None = None,
    preset: GridPreset | None = None,
    complete: bool = True,
    failed: tuple[str, ...] = (),
) -> Comparison:
    """Read runs and ask what they say; prefer: the baseline where none is asked for, if it is among the runs."""
    records = read_records(runs)
    metric = metric or (None if preset is None else preset.metric)
    baseline = baseline or (prefer if prefer in records.topologies else None)
    return Comparison(
        records, analyse(records, metric=metric, baseline=baseline), folder, title, preset, complete, failed
    )
