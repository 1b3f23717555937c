"""Plots over the steps of training, as plain plotly figures: losses with bands of seeds, held-out numbers."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from siamesenorm.lab.drawing.page import Figure, label
from siamesenorm.lab.report.by_steps import by_steps
from siamesenorm.lab.report.figures import DASHES, colours, title_of
from siamesenorm.lab.report.records import Records, Run
from siamesenorm.lab.report.statistics import WORST, Analysis

FEW = 6
"""Curves that can be told apart at once."""
DECADE = 10

Line = tuple[str, str, float]
"""Topology, setting, learning rate."""


def loss_curves(records: Records, analysis: Analysis) -> Figure:
    """Training loss over steps, the mean of seeds with a band from the lowest to the highest."""
    lines: dict[Line, list[Run]] = defaultdict(list)
    for run in records.runs:
        lines[run.topology, records.setting(run), run.lr].append(run)
    first = shown_first(lines, analysis)
    data: list[dict[str, Any]] = []
    for (topology, setting, lr), runs in sorted(lines.items(), key=lambda line: records.topologies.index(line[0][0])):
        colour, name = colours(records)[topology], name_of(records, topology, setting, lr)
        steps, means, lows, highs = _band(runs)
        common = {
            "legendgroup": name,
            "visible": True if (topology, setting, lr) in first else "legendonly",
            "mode": "lines",
        }
        if len(runs) > 1:
            data.append(
                {
                    **common,
                    "x": [*steps, *reversed(steps)],
                    "y": [*highs, *reversed(lows)],
                    "fill": "toself",
                    "fillcolor": _transparent(colour),
                    "line": {"width": 0},
                    "hoverinfo": "skip",
                    "showlegend": False,
                }
            )
        dash = dash_of(records, setting, lr)
        seeds = "" if len(runs) == 1 else f", {len(runs)} seeds"
        data.append(
            {
                **common,
                "x": steps,
                "y": means,
                "name": name,
                "line": {"color": colour, "dash": dash, "width": 2},
                "hovertemplate": f"{name}{seeds}<br>step %{{x}}: %{{y:.4f}}<extra></extra>",
            }
        )
        ends = [run for run in runs if run.state in WORST and run.curve]
        if ends:
            data.append(
                {
                    **common,
                    "mode": "markers",
                    "x": [run.curve[-1][0] for run in ends],
                    "y": [run.curve[-1][1] for run in ends],
                    "text": [label(f"{run.state}, seed {run.seed}: {run.message}") for run in ends],
                    "hovertemplate": "%{text}<extra></extra>",
                    "marker": {"symbol": "x", "size": 11, "color": colour},
                    "showlegend": False,
                }
            )
    layout = {
        "xaxis": {"title": {"text": "step"}},
        "yaxis": {
            "title": {"text": "training loss"},
            **log_axis(loss for run in records.runs for _, loss in run.curve),
        },
        "hovermode": "closest",
    }
    return {"data": data, "layout": layout}


def name_of(records: Records, topology: str, setting: str, lr: float) -> str:
    """What tells a line apart."""
    title = title_of(topology, setting)
    return title if len(records.lrs) == 1 and setting else f"{title} {lr:g}"


def dash_of(records: Records, setting: str, lr: float) -> str:
    """Dashes tell learning rates apart, or settings where there is one rate."""
    number = records.lrs.index(lr) if len(records.lrs) > 1 else records.groups.index(setting)
    return DASHES[number % len(DASHES)]


def shown_first(lines: Mapping[Line, Sequence[Run]], analysis: Analysis) -> set[Line]:
    """All lines if they are few; of more, the best of every topology and what failed; the others come by a click."""
    if len(lines) <= FEW:
        return set(lines)
    best = {(r.topology, r.setting): r.best for r in analysis.ranges}
    chosen = {line for line in lines if best.get(line[:2]) in (line[2], None)}
    failed = {line for line, runs in lines.items() if any(run.state in WORST for run in runs)}
    return chosen | failed if len(chosen | failed) <= 2 * FEW else chosen


def held_out_curves(records: Records, metric: str) -> Figure:
    """A held-out number over steps, means over seeds."""
    lines = by_steps(records, metric)
    data = [
        {
            "mode": "lines+markers",
            "name": name_of(records, line.topology, line.setting, line.lr),
            "x": list(line.values),
            "y": list(line.values.values()),
            "line": {
                "color": colours(records)[line.topology],
                "dash": dash_of(records, line.setting, line.lr),
                "width": 2,
            },
        }
        for line in lines
    ]
    scale = log_axis(value for line in lines for value in line.values.values())
    layout = {"xaxis": {"title": {"text": "step"}}, "yaxis": {"title": {"text": metric}, **scale}}
    return {"data": data, "layout": layout}


def log_axis(values: Iterable[float]) -> dict[str, str]:
    """A logarithmic axis; over more than a decade plotly would write 2 for 20, so ticks are given."""
    known = [value for value in values if value > 0]
    wide = bool(known) and max(known) > DECADE * min(known)
    return {"type": "log", **({"dtick": "D2", "tickformat": "~g"} if wide else {})}


def _band(runs: Sequence[Run]) -> tuple[list[int], list[float], list[float], list[float]]:
    """Steps with mean, lowest and highest loss of the runs that came so far."""
    by_step: dict[int, list[float]] = defaultdict(list)
    for run in runs:
        for step, loss in run.curve:
            by_step[step].append(loss)
    steps = sorted(by_step)
    means = [sum(by_step[s]) / len(by_step[s]) for s in steps]
    return steps, means, [min(by_step[s]) for s in steps], [max(by_step[s]) for s in steps]


def _transparent(colour: str) -> str:
    red, green, blue = (int(colour[place : place + 2], 16) for place in (1, 3, 5))
    return f"rgba({red},{green},{blue},0.15)"
