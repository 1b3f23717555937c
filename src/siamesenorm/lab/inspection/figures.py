"""The plots of an inspection, as plain plotly figures: dictionaries with ``data`` and ``layout``.

Fonts and backgrounds are the page's business; here stands what is drawn, and one sentence to read it by. A stream has
the same colour in every plot.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from siamesenorm.lab.drawing.page import PALETTE, Figure, label
from siamesenorm.lab.inspection import maps
from siamesenorm.lab.inspection.result import Inspection, Mixture
from siamesenorm.lab.inspection.similarity import END
from siamesenorm.lab.inspection.terminal import number, some, token

Values = Sequence[float | None]
DASH = "dot"
WIDE = 10
"""Largest over smallest value from which an axis is logarithmic; below, such an axis would have one or two marks."""
FEW = 12
"""Places on an axis that all have a number."""
LINES = 10
"""Streams that are drawn as lines at most, as many as there are colours."""


@dataclass(frozen=True)
class Plot:
    """A figure with its heading and the sentence below it."""

    name: str
    title: str
    about: str
    figure: Figure
    height: int = 420
    half: bool = False
    """Whether it may stand beside another one."""


def plots(found: Inspection) -> Iterator[Plot]:
    """Every plot that the inspection has numbers for."""
    yield Plot(
        "rms",
        "Hidden norm by depth",
        "Root mean square of each stream; depth 0 is the embedding, every sublayer adds one.",
        lines(depths(found), with_lines(found, found.rms), "depth", "rms", log=True),
    )
    if found.gradients is not None:
        series = with_lines(found, found.gradients)
        figure = lines(depths(found), series, "depth", "gradient norm", log=True)
        if found.output_gradients is not None:
            outputs = trace("outputs", depths(found)[1:], found.output_gradients, len(series), DASH)
            figure["data"].append({**outputs, "text": labels(found)})
        yield Plot(
            "gradients",
            "Gradient norm by depth",
            "Of the summed loss at a token's stream, dotted at the sublayers' outputs; root mean square over tokens.",
            figure,
        )
    yield Plot(
        "updates",
        "Update against stream",
        "How much each sublayer's output changes a stream, relative to the stream with an output of zero.",
        updates(found),
    )
    if len(found.streams) > 1 and any(read.gain_shares for read in found.reads):
        yield Plot(
            "shares",
            "Streams in what a sublayer sees",
            "Shares of the gains, and dotted of the measured contributions; the last place is the final fusion.",
            shares(found),
        )
    if len(found.streams) > 2 and any(read.gains for read in found.reads):
        yield Plot(
            "weights",
            "Weights of the streams",
            "What every sublayer and the end read each stream with: a mixing weight, or the mean gain of a norm.",
            maps.weights(found),
            height=maps.height(len(found.sublayers) + 1),
        )
    if found.collapse is not None:
        yield Plot(
            "collapse",
            "Stream collapse",
            "The largest stream's share of the energy of all, and the mean cosine of all pairs of streams.",
            lines(
                depths(found), {"largest": found.collapse.largest, "cosine": found.collapse.cosine}, "depth", "share"
            ),
        )
    if found.writers is not None:
        yield Plot(
            "writers",
            "Who wrote what a sublayer sees",
            f"Share of every writer in what a reader sees, on {found.writers.tokens} tokens: the projection of its "
            "component onto the reading, gates and norms held as they are. A row sums to one"
            + (" with its constants." if maps.has_constants(found) else "; a share may be negative."),
            maps.writers(found),
            height=maps.height(len(found.sublayers) + 1),
        )
    if found.attention_logits is not None:
        yield Plot(
            "logits",
            "Largest attention logit",
            "q·k / sqrt(head width), the largest over all heads and pairs of tokens that see each other.",
            logits(found),
        )
    if found.lens is not None:
        yield Plot(
            "lens",
            "Logit lens",
            "How often a stream alone, sent through the model's end and head, predicts what the model predicts in the "
            "end.",
            lens(found),
        )
    if found.removal is not None:
        yield Plot(
            "removal",
            "Loss rise without a sublayer or a block",
            f"Outputs replaced by zero; with all of them the loss is {number(found.removal.loss)}.",
            removal(found),
        )
    for name in found.similarity.cka:
        effective = number(found.similarity.effective_depth.get(name))
        yield Plot(
            f"similarity-{name}",
            f"Similarity between blocks, {'all streams at their end' if name == END else f'stream {name}'}",
            f"Linear CKA of {found.similarity.tokens} tokens. Effective depth {effective} of "
            f"{len(found.similarity.depths)}: the number of different representations.",
            similarity(found, name),
            height=400,
            half=len(found.similarity.cka) > 1,
        )
    yield Plot(
        "peaks",
        "Massive activations",
        "The largest activation of each stream and, dotted, the median of all, by size; hover for feature and token.",
        peaks(found),
    )


def with_lines(found: Inspection, series: Mapping[str, Values]) -> dict[str, Values]:
    """Those of the streams that have a line."""
    return {name: series[name] for name in some(found.streams, LINES) if name in series}


def depths(found: Inspection) -> list[int]:
    """0 to the number of sublayers."""
    return list(range(len(found.sublayers) + 1))


def labels(found: Inspection) -> list[str]:
    """Sublayers by block and kind."""
    return [label(sublayer.label) for sublayer in found.sublayers]


def trace(name: str, x: Sequence[Any], y: Values, color: int, dash: str = "solid") -> Figure:
    """One line with its points, in a colour by number."""
    paint = PALETTE[color % len(PALETTE)]
    return {
        "type": "scatter",
        "mode": "lines+markers",
        "name": label(name),
        "x": list(x),
        "y": list(y),
        "line": {"dash": dash, "color": paint},
        "marker": {"size": 5, "color": paint},
    }


def layout(x: str, y: str, places: int, *, log: bool = False, **more: Any) -> Figure:
    """Axes with their titles; few places on the x axis have whole numbers only."""
    y_axis: Figure = {"title": {"text": y}, **({"type": "log", "dtick": "D2", "tickformat": "~g"} if log else {})}
    x_axis: Figure = {"title": {"text": x}, **({"dtick": 1} if places <= FEW else {})}
    return {"xaxis": x_axis, "yaxis": y_axis, **more}


def lines(x: Sequence[Any], series: dict[str, Any], x_title: str, y_title: str, *, log: bool = False) -> Figure:
    """A line a stream; logarithmic where asked for, if the values ask for it too."""
    data = [trace(name, x, values, color) for color, (name, values) in enumerate(series.items())]
    return {"data": data, "layout": layout(x_title, y_title, len(x), log=log and wide(data))}


def wide(data: Sequence[Figure]) -> bool:
    """Whether a logarithmic axis shows lines better: all above zero, a factor of `WIDE` and more between them."""
    values = [value for line in data for value in line["y"] if value is not None]
    return bool(values) and min(values) > 0 and max(values) >= WIDE * min(values)


def updates(found: Inspection) -> Figure:
    """Behind every sublayer, whose names come by hovering."""
    figure = lines(depths(found)[1:], with_lines(found, found.updates), "depth", "|update| / |stream|", log=True)
    for line in figure["data"]:
        line |= named(labels(found))
    return figure


def logits(found: Inspection) -> Figure:
    """Behind every sublayer that has attention."""
    known = [(at + 1, value) for at, value in enumerate(found.attention_logits or ()) if value is not None]
    places = [at for at, _ in known]
    line = trace("logit", places, [value for _, value in known], 0) | named([labels(found)[at - 1] for at in places])
    return {"data": [line], "layout": layout("depth", "logit", len(depths(found)))}


def named(names: Sequence[str]) -> Figure:
    """Names of the points of a line."""
    return {"text": list(names), "hovertemplate": "%{text}: %{y:.4g}"}


def shares(found: Inspection) -> Figure:
    """Gain shares as lines, contributions dotted in the same colours, over all reads and the end."""
    places: list[Mixture] = [*found.reads, found.fusion]
    names = [*labels(found), "end"]
    data: list[Figure] = []
    for color, name in enumerate(some(found.streams, LINES)):
        for kind, dash in (("gain_shares", "solid"), ("contributions", DASH)):
            values = [(getattr(place, kind) or {}).get(name) for place in places]
            line = trace(f"{name} {'gain' if dash == 'solid' else 'contribution'}", depths(found), values, color, dash)
            data.append(line | named(names))
    figure = layout("depth", "share", len(places))
    figure["yaxis"]["range"] = [-0.02, 1.02]
    return {"data": data, "layout": figure}


def lens(found: Inspection) -> Figure:
    """Agreement in percent."""
    assert found.lens is not None
    series = with_lines(found, found.lens.alone or {})
    figure = lines(depths(found), {name: percent(values) for name, values in series.items()}, "depth", "agreement, %")
    if len(found.streams) > 1:
        together = percent(found.lens.together)
        figure["data"].append(trace("all together", depths(found), together, len(series), DASH))
    figure["layout"]["yaxis"]["range"] = [-2, 102]
    return figure


def percent(values: Values) -> list[float | None]:
    """Shares times 100."""
    return [None if value is None else 100 * value for value in values]


def removal(found: Inspection) -> Figure:
    """Bars for the sublayers of each kind, a mark for the whole block."""
    assert found.removal is not None
    data: list[Figure] = []
    kinds = list(dict.fromkeys(sublayer.kind for sublayer in found.sublayers))
    for color, kind in enumerate(kinds):
        mine = [sublayer for sublayer in found.sublayers if sublayer.kind == kind]
        bar: Figure = {"type": "bar", "name": label(kind), "marker": {"color": PALETTE[color % len(PALETTE)]}}
        bar["x"] = [sublayer.block for sublayer in mine]
        bar["y"] = [found.removal.sublayers[sublayer.index] for sublayer in mine]
        data.append(bar)
    blocks = trace("whole block", list(range(found.blocks)), found.removal.blocks, len(kinds), DASH)
    blocks |= {"mode": "markers", "marker": {**blocks["marker"], "symbol": "diamond", "size": 8}}
    return {"data": [*data, blocks], "layout": layout("block", "loss rise", found.blocks, barmode="group")}


def similarity(found: Inspection, name: str) -> Figure:
    """A heat map of CKA over blocks; 0 is the embedding."""
    matrix = [list(row) for row in found.similarity.cka[name]]
    places = list(range(len(matrix)))
    heat = {"type": "heatmap", "z": matrix, "x": places, "y": places, "zmin": 0, "zmax": 1, "colorscale": "Viridis"}
    heat["colorbar"] = {"thickness": 10, "outlinewidth": 0}
    heat["hovertemplate"] = "behind blocks %{x} and %{y}: %{z:.3f}<extra></extra>"
    figure = layout("blocks run", "blocks run", len(places))
    figure["xaxis"] |= {"constrain": "domain"}
    figure["yaxis"] = figure["xaxis"] | {"scaleanchor": "x"}
    return {"data": [heat], "layout": figure}


def peaks(found: Inspection) -> Figure:
    """Largest and median sizes."""
    data: list[Figure] = []
    for color, name in enumerate(some(found.streams, LINES)):
        entries = [(depth, peak) for depth, peak in enumerate(found.peaks[name]) if peak is not None]
        places = [depth for depth, _ in entries]
        largest = trace(f"{name} largest", places, [peak.largest for _, peak in entries], color)
        largest["text"] = [
            f"feature {peak.dims[0]}, {token(peak.tokens[0])}" if peak.dims and peak.tokens else ""
            for _, peak in entries
        ]
        median = trace(f"{name} median", places, [peak.median for _, peak in entries], color, DASH)
        data += [largest, median]
    return {"data": data, "layout": layout("depth", "|activation|", len(depths(found)), log=wide(data))}
