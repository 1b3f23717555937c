"""Heat maps of an inspection with readers as rows: who wrote what they see, and what they read each stream with."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from siamesenorm.lab.drawing.page import Figure, label
from siamesenorm.lab.inspection.result import Inspection

TICKS = 30
"""Places on an axis that have a name at most."""
SEEN = 5e-3
"""Share from which on constants are drawn; below it they are rounding."""
DIVERGING = [[0, "#ef4444"], [0.5, "#f8fafc"], [1, "#1d4ed8"]]


def writers(found: Inspection) -> Figure:
    """Readers × writers; white is no share, red a negative one."""
    assert found.writers is not None
    rows = [[*row, *([None] * (len(found.sublayers) + 1 - len(row)))] for row in found.writers.shares]
    columns = ["embedding", *(sublayer.label for sublayer in found.sublayers)]
    if has_constants(found):
        rows = [[*row, rest] for row, rest in zip(rows, found.writers.constants, strict=True)]
        columns.append("constants")
    largest = max((abs(share) for row in rows for share in row if share is not None), default=1.0)
    colours = {"zmin": -largest, "zmax": largest, "colorscale": DIVERGING}
    return heat(rows, columns, readers(found), "writer", "%{y} sees %{z:.3f} of %{x}<extra></extra>", **colours)


def has_constants(found: Inspection) -> bool:
    """Whether biases have a share worth mentioning."""
    return found.writers is not None and any(abs(rest or 0.0) > SEEN for rest in found.writers.constants)


def weights(found: Inspection) -> Figure:
    """Readers × streams; nothing where a stream is not there yet."""
    places = [*found.reads, found.fusion]
    rows = [[(place.gains or {}).get(name) for name in found.streams] for place in places]
    hover = "%{y} reads %{x} with %{z:.3g}<extra></extra>"
    return heat(rows, found.streams, readers(found), "stream", hover, zmin=0, colorscale="Viridis")


def readers(found: Inspection) -> list[str]:
    """Every sublayer, and the end."""
    return [*(sublayer.label for sublayer in found.sublayers), "end"]


def heat(z: list[list[Any]], x: Sequence[str], y: Sequence[str], title: str, hover: str, **more: Any) -> Figure:
    """A map with named columns and rows, the first row on top."""
    # Categories would merge two places of one name.
    trace: Figure = {"type": "heatmap", "z": z, "x": list(range(len(x))), "y": list(range(len(y))), **more}
    trace |= {"hoverongaps": False, "hovertemplate": hover, "colorbar": {"thickness": 10, "outlinewidth": 0}}
    axis = {"title": {"text": title}, "showgrid": False, **ticks(x)}
    return {
        "data": [trace],
        "layout": {"xaxis": axis, "yaxis": {"autorange": "reversed", "showgrid": False, **ticks(y)}},
    }


def ticks(names: Sequence[str]) -> Figure:
    """Names of places, all of them or as many as can be read."""
    places = list(range(0, len(names), -(-len(names) // TICKS)))
    named = {"tickvals": places, "ticktext": [label(names[at]) for at in places]}
    return {"tickmode": "array", **named, "automargin": True, "zeroline": False}


def height(rows: int) -> int:
    """Of a figure in which every row can be seen."""
    return min(900, max(320, 140 + 18 * rows))
