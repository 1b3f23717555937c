"""What a comparison found, as a value of Python: verdict, table, figures, and itself in a notebook or a browser."""

from __future__ import annotations

import importlib
import importlib.util
import webbrowser
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from siamesenorm.lab.page import as_figures, escape
from siamesenorm.lab.presets import Preset
from siamesenorm.lab.records import Records, read_records
from siamesenorm.lab.report import HTML, write_report
from siamesenorm.lab.report_page import make_page
from siamesenorm.lab.rows import run_row
from siamesenorm.lab.statistics import Analysis, analyse, by_training
from siamesenorm.lab.tables import notes, place_text, what_is_shown
from siamesenorm.lab.verdict import verdict


@dataclass(frozen=True, repr=False)
class Comparison:
    """Finished runs and what they say of their topologies."""

    records: Records
    analysis: Analysis
    folder: Path
    title: str = ""
    preset: Preset | None = None
    complete: bool = True
    """Whether every run that was asked for has ended; False after Ctrl-C."""
    failed: tuple[str, ...] = field(default=())
    """Runs that could not be made, and why."""

    @property
    def verdict(self) -> str:
        """What the runs say, a sentence a line."""
        return "\n".join(self.sentences)

    @property
    def sentences(self) -> list[str]:
        """The verdict, under each optimiser."""
        parts = by_training(self.records, self.analysis)
        return list(dict.fromkeys(sentence for _, part in parts for sentence in verdict(part)))

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
        """The plots of the report by name: figures of plotly where that is installed, plain data elsewhere."""
        return as_figures(make_page(self.records, self.analysis, self.title, self.preset, self.folder).figures)

    @property
    def page(self) -> Path:
        """The report."""
        return self.folder / HTML

    def write(self) -> Path:
        """Write report.html, report.json and report.csv; the page's path is returned."""
        return write_report(self.records, self.analysis, self.folder, title=self.title, preset=self.preset)

    def open(self) -> None:
        """Show the report in a browser."""
        if not self.page.is_file():
            self.write()
        webbrowser.open(self.page.resolve().as_uri())

    def __repr__(self) -> str:
        return f"{self.verdict}\n{self.page}"

    def _repr_html_(self) -> str:
        """The verdict and the table of topologies by learning rates, for notebooks."""
        lrs, grouped = self.records.lrs, self.records.groups != [""]
        head = [*(["setting"] if grouped else []), "topology", *(f"lr {lr:g}" for lr in lrs)]
        rows = [
            [
                *([found.setting] if grouped else []),
                found.topology,
                *(place_text(self.analysis.place(found.topology, found.setting, lr)) for lr in lrs),
            ]
            for found in self.analysis.ranges
        ]
        items = "".join(f"<li>{escape(sentence)}</li>" for sentence in self.sentences)
        words = [*notes(self.records), *self.failed, *([] if self.complete else ["interrupted; the same call goes on"])]
        told = "".join(f"<p><em>{escape(note)}</em></p>" for note in words)
        return (
            f"<ul>{items}</ul>{told}<table><caption>{escape(what_is_shown(self.analysis))}</caption>"
            f"<thead><tr>{''.join(f'<th>{escape(text)}</th>' for text in head)}</tr></thead><tbody>"
            + "".join(f"<tr>{''.join(f'<td>{escape(text)}</td>' for text in row)}</tr>" for row in rows)
            + f"</tbody></table><p><code>{escape(self.page)}</code></p>"
        )


def read_comparison(
    runs: Sequence[Path],
    folder: Path,
    *,
    prefer: str = "",
    title: str = "",
    metric: str | None = None,
    baseline: str | None = None,
    preset: Preset | None = None,
    complete: bool = True,
    failed: tuple[str, ...] = (),
) -> Comparison:
    """Read runs and ask what they say; prefer: the baseline where none is asked for, if it is among the runs."""
    records = read_records(runs)
    baseline = baseline or (prefer if prefer in records.topologies else None)
    analysis = analyse(records, metric=metric, baseline=baseline)
    return Comparison(records, analysis, folder, title, preset, complete, failed)
