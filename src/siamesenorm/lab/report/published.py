"""The paper's figures with ours beside them: as data and as texts."""

from __future__ import annotations

from typing import Any

from siamesenorm.lab.compare.presets import Preset
from siamesenorm.lab.report.sentences import place_text, what_is_shown
from siamesenorm.lab.report.statistics import Analysis

HEADERS = ("paper's setting", "topology", "published", "ours", "our setting")


def published_rows(analysis: Analysis, preset: Preset) -> list[dict[str, Any]]:
    """The paper's figures with ours beside them."""
    rows = []
    for figure in preset.published:
        place = None if figure.lr is None else analysis.place(figure.topology, figure.setting, figure.lr)
        rows.append(
            {
                "where": figure.where,
                "topology": figure.topology,
                "published": figure.value,
                "our_lr": figure.lr,
                "our_setting": figure.setting,
                "ours": None if place is None else place_text(place),
            }
        )
    return rows


def published_texts(analysis: Analysis, preset: Preset) -> list[tuple[str, ...]]:
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
        for row in published_rows(analysis, preset)
    ]


def about(analysis: Analysis, preset: Preset) -> str:
    """What the two columns of numbers are."""
    return f"{preset.about} arXiv 2602.08064; one run a cell, no spread. Ours: {what_is_shown(analysis)}."
