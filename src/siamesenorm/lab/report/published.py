"""The paper's figures with ours beside them: as data and as texts.

What stands inside trained models is read from the inspections that lie in the runs' folders.
"""

from __future__ import annotations

import statistics
from typing import Any

from siamesenorm.lab.compare.presets import GridPreset, Published
from siamesenorm.lab.inspection.looking import inspection_of
from siamesenorm.lab.report.findings import Findings
from siamesenorm.lab.report.sentences import place_text, what_is_shown
from siamesenorm.lab.report.statistics import SeedScores

HEADERS = ("paper's setting", "topology", "published", "ours", "our setting")


def published_rows(found: Findings) -> list[dict[str, Any]]:
    """The paper's figures with ours beside them; none without a preset."""
    rows = []
    for figure in () if found.preset is None else found.preset.published:
        place = None if figure.lr is None else found.analysis.place(figure.topology, figure.setting, figure.lr)
        rows.append(
            {
                "where": figure.where,
                "topology": figure.topology,
                "published": figure.value,
                "our_lr": figure.lr,
                "our_setting": figure.setting,
                "ours": None if place is None else _ours(found, figure, place),
            }
        )
    return rows


def _ours(found: Findings, figure: Published, place: SeedScores) -> str | None:
    """Our figure with its spread over seeds."""
    if figure.inside is None:
        return place_text(place)
    what, stream = figure.inside
    values = []
    for run in found.records.runs:
        of = run.topology, found.records.setting(run), run.lr
        if run.state == "finished" and of == (place.topology, place.setting, place.lr):
            inside = inspection_of(run.folder)
            known = None if inside is None else inside.at_end(what).get(stream)
            values += [] if known is None else [known]
    if not values:
        return None
    spread = f" ± {statistics.stdev(values):.4f}" if len(values) > 1 else ""
    return f"{statistics.fmean(values):.4f}{spread}"


def published_texts(found: Findings) -> list[tuple[str, ...]]:
    """The same as a table under `HEADERS`."""
    return [
        (
            row["where"],
            row["topology"],
            f"{row['published']:.{2 if row['published'] >= 1 else 3}f}"
            if isinstance(row["published"], float)
            else row["published"],
            row["ours"] or "–",
            " ".join(filter(None, (f"lr {row['our_lr']:g}" if row["our_lr"] else "", row["our_setting"]))) or "–",
        )
        for row in published_rows(found)
    ]


def about(found: Findings, preset: GridPreset) -> str:
    """What the two columns of numbers are."""
    shown = "mean ± standard deviation over seeds" if preset.looks_inside else what_is_shown(found.analysis)
    return f"{preset.about} arXiv 2602.08064; one run per cell, no spread. Ours: {shown}."
