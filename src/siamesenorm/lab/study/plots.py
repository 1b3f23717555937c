"""The two pictures of a study: differences from the baseline, and best numbers by configurations tried."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

from siamesenorm.data.atomic import whole_file
from siamesenorm.lab.study.analysis import PartResult, StudyResult
from siamesenorm.lab.study.plan import StudyPlan

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DIFFERENCES, TRIED = "differences.svg", "tried.svg"
WIDTH, ROW = 7.0, 0.28
"""Inches."""
MARKERS = "osD^v<>Pp*hX"


def draw_pictures(plan: StudyPlan, result: StudyResult, folder: Path) -> list[str]:
    """Draw what there is to see; names of the pictures, none without matplotlib (extra: plot)."""
    if importlib.util.find_spec("matplotlib") is None:
        return []  # pictures of an earlier page may lie there, and would show other numbers than this one
    import matplotlib as mpl

    drawn = []
    with mpl.rc_context({"svg.hashsalt": "siamesenorm", "font.size": 9}):
        for name, figure in ((DIFFERENCES, differences(plan, result)), (TRIED, tried(plan, result))):
            if figure is not None:
                with whole_file(folder / name) as file:
                    figure.savefig(file, format="svg", metadata={"Date": None})
                drawn.append(name)
    return drawn


def differences(plan: StudyPlan, result: StudyResult) -> Figure | None:
    """Every arm against the baseline with its simultaneous interval, a panel for each part that has some."""
    parts = [part for part in result.parts if any(arm.comparison is not None for arm in part.arms)]
    if not parts:
        return None
    from matplotlib.figure import Figure

    rows = sum(len(part.arms) + 2 for part in parts)
    figure = Figure(figsize=(WIDTH, ROW * rows + 0.6), layout="constrained")
    panels = figure.subplots(len(parts), 1, squeeze=False, height_ratios=[len(part.arms) for part in parts])[:, 0]
    for axes, part in zip(panels, parts, strict=True):
        _differences(axes, plan, part)
    return figure


def _differences(axes: Axes, plan: StudyPlan, part: PartResult) -> None:
    arms = [arm for arm in part.arms if arm.arm != plan.baseline]
    axes.axvline(0, color="0.5", linewidth=0.8)
    for row, arm in enumerate(arms):
        if arm.comparison is None:
            axes.text(0, row, " not yet run", color="0.5", va="center", fontsize=8)
            continue
        found = arm.comparison.difference
        colour = "tab:blue" if arm.comparison.clear and found.count == part.part.seeds else "0.45"
        if found.low is not None and found.high is not None:
            axes.plot([found.low, found.high], [row, row], color=colour, linewidth=1.5)
        axes.plot([found.mean], [row], "o", color=colour, markersize=4)
    axes.set_yticks(range(len(arms)), [arm.arm for arm in arms])
    axes.set_ylim(len(arms) - 0.5, -0.5)
    axes.set_title(part.part.name, loc="left", fontsize=9)
    axes.set_xlabel(f"{plan.metric} minus {plan.baseline}")


def tried(plan: StudyPlan, result: StudyResult) -> Figure | None:
    """Expected best number by configurations tried, in the first part that has a search of two or more."""
    part = next((part for part in result.parts if any(len(arm.best_of) > 1 for arm in part.arms)), None)
    if part is None:
        return None
    from matplotlib.figure import Figure

    figure = Figure(figsize=(WIDTH, 4.0), layout="constrained")
    axes = figure.subplots()
    for number, arm in enumerate(part.arms):
        if arm.best_of:
            style = {"color": f"C{number % 10}", "marker": MARKERS[number % len(MARKERS)], "markersize": 3.5}
            style["linestyle"] = "-" if number < 10 else "--"  # colours come again
            axes.plot(range(1, len(arm.best_of) + 1), arm.best_of, label=arm.arm, linewidth=1.2, **style)  # type: ignore[arg-type]
    axes.set(xlabel="configurations tried", ylabel=f"expected best {plan.metric}")
    axes.set_title(part.part.name, loc="left", fontsize=9)
    figure.legend(frameon=False, fontsize=8, loc="outside right upper")
    return figure
