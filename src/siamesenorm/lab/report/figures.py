"""The plots of a comparison, as plain plotly figures: loss by learning rate, differences, heat map, cost."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from siamesenorm.lab.drawing.contrast import SCALE, ink, on_scale
from siamesenorm.lab.drawing.page import PALETTE, Figure, label
from siamesenorm.lab.report.records import Records
from siamesenorm.lab.report.sentences import place_text
from siamesenorm.lab.report.statistics import Analysis, PairedComparison, SeedScores

DASHES = ("solid", "dash", "dot", "dashdot", "longdash", "longdashdot")
SYMBOLS = ("circle", "square", "diamond", "triangle-up", "star", "pentagon", "hexagon", "cross")
LONGEST = 20
"""Signs of a title that are not folded."""
COSTS = ("#6366f1", "#94a3b8", "#14b8a6")
"""Colours of what is measured; those of topologies would mislead."""


def colours(records: Records) -> dict[str, str]:
    """A colour for every topology, the same in all plots."""
    return {topology: PALETTE[number % len(PALETTE)] for number, topology in enumerate(records.topologies)}


def title_of(topology: str, setting: str) -> str:
    """How a line is called."""
    return label(f"{topology}, {setting}" if setting else topology)


def folded(title: str) -> str:
    """A title for the side of a plot, in lines of a few words."""
    return title.replace(",", ",<br>").replace(":", ":<br>") if len(title) > LONGEST else title


# Against the learning rate -----------------------------------------------------------------------------------


def by_learning_rate(records: Records, analysis: Analysis) -> Figure:
    """The held-out metric over learning rates, with crosses where runs diverged."""
    means = [p.mean for p in analysis.places if p.mean is not None]
    low, high = (min(means), max(means)) if means else (0.0, 1.0)
    room = (high - low) or abs(high) or 1.0
    data: list[dict[str, Any]] = []
    crosses: list[dict[str, Any]] = []
    for number, found in enumerate(analysis.ranges):
        places = [p for p in analysis.places if (p.topology, p.setting) == (found.topology, found.setting)]
        colour, name = colours(records)[found.topology], title_of(found.topology, found.setting)
        dash = DASHES[records.groups.index(found.setting) % len(DASHES)]
        ends = [p for p in places if p.mean is not None]
        line = means_line(ends, name, colour, number, "lr %{x}", [p.lr for p in ends])
        line["line"]["dash"] = dash
        data.append({**line, "legendgroup": name})
        failed = [p for p in places if p.failed]
        if failed:
            level = high + (0.12 + 0.07 * len(crosses)) * room  # a row each, or one would hide the others
            crosses.append(
                {
                    "x": [p.lr for p in failed],
                    "y": [level] * len(failed),
                    "mode": "markers",
                    "legendgroup": name,
                    "showlegend": False,
                    "marker": {"symbol": "x", "size": 13, "color": colour},
                    "text": [label(place_text(p)) for p in failed],
                    "hovertemplate": f"{name}<br>lr %{{x}}: %{{text}}<extra></extra>",
                }
            )
    layout: Figure = {
        "xaxis": {"title": {"text": "peak learning rate"}, "type": "log", "tickvals": records.lrs},
        "yaxis": {"title": {"text": label(f"held-out {analysis.metric}")}},
    }
    layout["xaxis"]["ticktext"] = [f"{lr:g}" for lr in records.lrs]
    if crosses:
        above = {"yanchor": "bottom", "yshift": 10, "xanchor": "left", "showarrow": False}
        layout["annotations"] = [
            {"text": "✗ diverged or stuck", "xref": "paper", "x": 0, "y": crosses[-1]["y"][0], **above}
        ]
        edge = high + 0.06 * room
        layout["shapes"] = [
            {
                "type": "line",
                "xref": "paper",
                "x0": 0,
                "x1": 1,
                "y0": edge,
                "y1": edge,
                "line": {"dash": "dot", "width": 1, "color": PALETTE[-1]},
                "layer": "below",
            }
        ]
    return {"data": data + crosses, "layout": layout}


def means_line(
    places: Sequence[SeedScores], name: str, colour: str, number: int, where: str, x: Sequence[Any]
) -> dict[str, Any]:
    """Means over seeds with their standard deviation; where: what hovering says of the place on the x axis."""
    spreads = [p.spread or 0.0 for p in places]
    return {
        "x": list(x),
        "y": [p.mean for p in places],
        "name": name,
        "mode": "lines+markers",
        "line": {"color": colour, "width": 2},
        "marker": {"size": 9, "symbol": SYMBOLS[number % len(SYMBOLS)]},
        "error_y": {"type": "data", "array": spreads, "visible": any(spreads), "thickness": 1.2},
        "text": [label(place_text(p)) for p in places],
        "hovertemplate": f"{name}<br>{where}: %{{text}}<extra></extra>",
    }


def by_settings(records: Records) -> bool:
    """Whether the grid is one of settings, such as depths, at a single learning rate."""
    return len(records.lrs) == 1 and len(records.groups) > 1


def by_setting(records: Records, analysis: Analysis) -> Figure:
    """The held-out metric over settings, such as depths, of grids with one learning rate; one line per topology."""
    data: list[dict[str, Any]] = []
    for number, topology in enumerate(records.topologies):
        places = [p for p in analysis.places if p.topology == topology and p.mean is not None]
        colour, across = colours(records)[topology], [label(p.setting) for p in places]
        data.append(means_line(places, label(topology), colour, number, "%{x}", across))
    order = {"type": "category", "categoryorder": "array", "categoryarray": [label(g) for g in records.groups]}
    return {
        "data": data,
        "layout": {"xaxis": order, "yaxis": {"title": {"text": label(f"held-out {analysis.metric}")}}},
    }


def heat_map(records: Records, analysis: Analysis) -> Figure:
    """The grid at a glance: a row for every topology and setting, a column for every learning rate.

    With one learning rate, a row for every topology and a column for every setting.
    """
    rows = list(reversed([(r.topology, r.setting) for r in analysis.ranges]))
    places = [[analysis.place(topology, setting, lr) for lr in records.lrs] for topology, setting in rows]
    columns, title, across = [f"{lr:g}" for lr in records.lrs], "peak learning rate", "lr "
    if by_settings(records):
        rows = [(topology, "") for topology in reversed(records.topologies)]
        places = [[analysis.place(topology, group, records.lrs[0]) for group in records.groups] for topology, _ in rows]
        columns, title, across = [label(group) for group in records.groups], "", ""
    heat: dict[str, Any] = {
        "type": "heatmap",
        "x": columns,
        "y": [folded(title_of(topology, setting)) for topology, setting in rows],
        "z": [[None if place is None else place.mean for place in row] for row in places],
        "text": [["" if is_empty(place) else label(short_text(place)) for place in row] for row in places],
        "hovertemplate": f"%{{y}}<br>{across}%{{x}}: %{{text}}<extra></extra>",
        "meta": {"labelled": True},
        "colorscale": SCALE,
        "reversescale": not analysis.higher_is_better,
        "xgap": 3,
        "ygap": 3,
        "colorbar": {"thickness": 12, "outlinewidth": 0},
        "hoverongaps": False,
    }
    means = [place.mean for row in places for place in row if place is not None and place.mean is not None]
    notes = []
    for line, row in enumerate(places):
        for column, place in enumerate(row):
            if place is None:
                continue
            # By number: plotly would take the name "0.032" for a place on the axis.
            text = label(short_text(place)).replace("✗ ", "✗<br>" if place.mean is None else "✗ ")
            note: dict[str, Any] = {"x": column, "y": line, "text": text, "showarrow": False}
            if place.mean is not None:
                share = (place.mean - min(means)) / ((max(means) - min(means)) or 1.0)
                note["font"] = {"color": ink(on_scale(share if analysis.higher_is_better else 1 - share))}
            notes.append(note)
    layout = {
        "xaxis": {"title": {"text": title}, "type": "category", "showgrid": False},
        "yaxis": {"type": "category", "showgrid": False},
        "annotations": notes,
    }
    return {"data": [heat], "layout": layout}


def is_empty(place: Any) -> bool:
    """Whether a cell ran but has no number, since none of its seeds reached the end."""
    return place is not None and place.mean is None


def short_text(place: Any) -> str:
    """A number of few digits, or how it ended."""
    if place is None:
        return ""
    if place.mean is None:
        return "✗ " + " or ".join(sorted(set(place.failed.values())))
    return f"{place.mean:.3f}" + (f" ({len(place.failed)} ✗)" if place.failed else "")


# Against the baseline ----------------------------------------------------------------------------------------


def differences(records: Records, analysis: Analysis) -> Figure:
    """Paired differences with their confidence intervals."""
    one_lr = len(records.lrs) == 1  # its best is the only one
    rows = [(c, True) for c in analysis.best_lr if not one_lr] + [(c, False) for c in analysis.same_lr]
    data = []
    for topology in records.topologies:
        mine = [(c, best) for c, best in rows if c.topology == topology]
        if not mine:
            continue
        means = [c.difference.mean for c, _ in mine]
        reach = [0.0 if c.difference.high is None else c.difference.high - c.difference.mean for c, _ in mine]
        data.append(
            {
                "x": means,
                "y": [_difference_name(c, best) for c, best in mine],
                "name": label(topology),
                "mode": "markers",
                "marker": {"color": colours(records)[topology], "size": [13 if best else 9 for _, best in mine]},
                "error_x": {"type": "data", "array": reach, "visible": any(reach), "thickness": 2},
                "text": [label(f"{c.score:.4f} against {c.baseline_score:.4f}") for c, _ in mine],
                "hovertemplate": "%{y}<br>%{x:+.4f}: %{text}<extra></extra>",
            }
        )
    better = "right" if analysis.higher_is_better else "left"
    return {
        "data": data,
        "layout": {
            "xaxis": {
                "title": {"text": label(f"{analysis.metric} minus {analysis.baseline}'s; {better} of zero is better")},
                "zeroline": True,
                "zerolinewidth": 2,
            },
            "yaxis": {"type": "category", "autorange": "reversed"},
            "showlegend": False,
        },
    }


def _difference_name(comparison: PairedComparison, best: bool) -> str:
    where = "each at its best" if best else f"lr {comparison.lr:g}"
    return folded(f"{title_of(comparison.topology, comparison.setting)}, {where}")


def cost(records: Records, analysis: Analysis) -> Figure:
    """Time and memory of every topology, the baseline being 100 %."""
    kinds = {"processor_ratio": "processor time a step", "step_ratio": "time a step", "memory_ratio": "memory"}
    data = []
    for number, (field, name) in enumerate(kinds.items()):
        known = [c for c in analysis.costs if getattr(c, field) is not None]
        if known:
            shares = [100 * getattr(c, field) for c in known]
            data.append(
                {
                    "type": "bar",
                    "x": [folded(title_of(c.topology, c.setting)) for c in known],
                    "y": shares,
                    "name": name,
                    "marker": {"color": COSTS[number]},
                    "text": [f"{share:.0f}" for share in shares],
                    "textposition": "auto",
                    "insidetextfont": {"color": ink(COSTS[number])},
                    "hovertemplate": f"%{{x}}<br>{name}: %{{y:.1f}} %<extra></extra>",
                }
            )
    title = label(f"% of {analysis.baseline}")
    return {"data": data, "layout": {"barmode": "group", "yaxis": {"title": {"text": title}, "rangemode": "tozero"}}}
