"""The plots of a report as PNG, SVG or PDF for papers: the page's own figures, drawn by matplotlib (extra: plot)."""

from __future__ import annotations

import html
import importlib.util
import math
import re
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from siamesenorm.data.atomic import whole_file
from siamesenorm.errors import ConfigError
from siamesenorm.lab.report.findings import Findings
from siamesenorm.lab.report.page import make_page

if TYPE_CHECKING:
    from matplotlib.axes import Axes

FORMATS = ("png", "svg", "pdf")
FOLDER = "figures"
DASHES = {"dash": "--", "dot": ":", "dashdot": "-.", "longdash": (0, (8, 4)), "longdashdot": (0, (8, 3, 2, 3))}
MARKERS = {"square": "s", "diamond": "D", "triangle-up": "^", "star": "*", "pentagon": "p", "hexagon": "H"}
MARKERS |= {"cross": "P", "x": "x"}
"""plotly's names, and matplotlib's for the same."""


def parse_formats(text: str) -> tuple[str, ...]:
    """``png,svg`` as names of formats."""
    names = tuple(dict.fromkeys(part.strip().lower() for part in text.split(",")))
    for name in names:
        if name not in FORMATS:
            raise ConfigError.unknown("--figures", name, FORMATS)
    if importlib.util.find_spec("matplotlib") is None:
        raise ConfigError.missing_package("--figures:", "matplotlib", "plot")
    return names


def export_figures(found: Findings, formats: Iterable[str]) -> list[Path]:
    """Draw every plot of the page into ``figures/`` of the report's folder."""
    from matplotlib.figure import Figure

    folder = found.folder / FOLDER
    folder.mkdir(parents=True, exist_ok=True)
    written = []
    for name, plain in make_page(found).figures.items():
        figure = Figure(figsize=(6.4, 4.0), layout="constrained")
        draw(figure.subplots(), plain["data"], plain["layout"])
        for kind in formats:
            path = folder / f"{name.replace('-', '_')}.{kind}"
            # No date inside: the same runs give the same file.
            with whole_file(path) as file:
                figure.savefig(file, format=kind, dpi=200, metadata={"Date": None} if kind == "svg" else None)
            written.append(path)
    return written


def draw(axes: Axes, data: list[dict[str, Any]], layout: dict[str, Any]) -> None:
    """A plain figure of plotly, as far as those of a report go; lines that wait for a click are left out."""
    shown = [trace for trace in data if trace.get("visible", True) is True]
    bars = [trace for trace in shown if trace.get("type") == "bar"]
    for trace in shown:
        if trace.get("type") == "heatmap":
            _heat_map(axes, trace, layout)
        elif trace.get("type") == "bar":
            _bars(axes, trace, bars.index(trace) - (len(bars) - 1) / 2, 0.8 / len(bars))
        elif "fill" in trace:
            *colour, strength = map(float, re.findall(r"[\d.]+", trace["fillcolor"]))
            axes.fill(trace["x"], trace["y"], color=[part / 255 for part in colour], alpha=strength, linewidth=0)
        else:
            _line(axes, trace)
    for name, axis in (("x", axes.xaxis), ("y", axes.yaxis)):
        wanted = layout.get(f"{name}axis", {})
        axis.set_label_text(plain_text(wanted.get("title", {}).get("text", "")))
        if wanted.get("type") == "log":
            axes.set(**{f"{name}scale": "log"})
        if "tickvals" in wanted:
            axis.set_ticks(wanted["tickvals"], wanted["ticktext"], minor=False)
            axes.minorticks_off()
        if wanted.get("autorange") == "reversed":
            axis.set_inverted(True)
        if wanted.get("zeroline"):
            (axes.axvline if name == "x" else axes.axhline)(0, color="grey", linewidth=0.8)
    for shape in layout.get("shapes", ()):
        axes.axhline(shape["y0"], color=shape["line"]["color"], linestyle=":", linewidth=1)
    for note in layout.get("annotations", ()):
        if note.get("xref") == "paper":
            axes.text(0.02, note["y"], plain_text(note["text"]), transform=axes.get_yaxis_transform(), fontsize=8)
    if layout.get("showlegend", True) and axes.get_legend_handles_labels()[1]:
        axes.legend(frameon=False, fontsize=8)


def _line(axes: Axes, trace: dict[str, Any]) -> None:
    """Lines, markers or both, with errors where there are some."""
    line, marker, mode = trace.get("line", {}), trace.get("marker", {}), trace.get("mode", "lines")
    errors = {f"{name}err": trace[f"error_{name}"] for name in "xy" if trace.get(f"error_{name}", {}).get("visible")}
    x, y = ([plain_text(value) if isinstance(value, str) else value for value in trace[name]] for name in "xy")
    axes.errorbar(
        x,
        y,
        **{name: error["array"] for name, error in errors.items()},
        color=line.get("color") or marker.get("color"),
        linestyle=DASHES.get(line.get("dash", "solid"), "-") if "lines" in mode else "none",
        linewidth=1.2,
        marker=MARKERS.get(marker.get("symbol", "circle"), "o") if "markers" in mode else "",
        capsize=2,
        label=plain_text(trace["name"]) if trace.get("showlegend", True) and "name" in trace else None,
    )


def _bars(axes: Axes, trace: dict[str, Any], place: float, width: float) -> None:
    """One of several groups of bars, side by side."""
    places = [number + place * width for number in range(len(trace["x"]))]
    axes.bar(places, trace["y"], width, color=trace["marker"]["color"], label=plain_text(trace["name"]))
    axes.set_xticks(range(len(trace["x"])), list(map(plain_text, trace["x"])), fontsize=8)


def _heat_map(axes: Axes, trace: dict[str, Any], layout: dict[str, Any]) -> None:
    """The numbers stand on the colours as they do on the page."""
    values = [[math.nan if value is None else value for value in row] for row in trace["z"]]
    axes.imshow(values, aspect="auto", origin="lower", cmap="viridis_r" if trace["reversescale"] else "viridis")
    axes.set_xticks(range(len(trace["x"])), list(map(plain_text, trace["x"])))
    axes.set_yticks(range(len(trace["y"])), list(map(plain_text, trace["y"])), fontsize=8)
    for note in layout["annotations"]:
        colour = note.get("font", {}).get("color", "black")
        axes.text(note["x"], note["y"], plain_text(note["text"]), ha="center", va="center", fontsize=8, color=colour)


def plain_text(text: str) -> str:
    """Text of a plot as matplotlib shows it: no tags, no formulas."""
    return html.unescape(text.replace("<br>", "\n")).replace("$", r"\$")
