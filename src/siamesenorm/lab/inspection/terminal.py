"""An inspection on the terminal: every measurement a row with a sparkline over depth, then what stands out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from siamesenorm.lab.inspection.result import Inspection
from siamesenorm.lab.live import sparkline

SPARK = 36
"""Signs of a sparkline at most."""
WIDE_RANGE = 30.0
"""Ratio of the largest to the smallest value from which on a sparkline is logarithmic."""
STAND_OUT = 3
"""Sublayers named that the loss depends on most."""
PAPER = {"gains": {"x": 1.05, "y": 0.42}, "lens": {"x": 0.426, "y": 0.162}}
"""Of the paper's 1.3B model (arXiv 2602.08064)."""

Values = Sequence[float | None]


def show(console: Console, found: Inspection) -> None:
    """Everything, in the width of a terminal."""
    console.print(title(found), soft_wrap=True)
    console.print()
    console.print(profile(found, min(SPARK, max(8, console.width - 44))))
    console.print()
    grid = Table.grid(padding=(0, 2, 0, 0))
    for name, text in notes(found):
        grid.add_row(Text(name, style="dim"), Text(text))
    console.print(grid)


def title(found: Inspection) -> Text:
    """Model, text and loss."""
    source = found.source
    text = Text.assemble((found.topology, "bold cyan"), f"  {found.blocks} blocks × {found.dim}")
    if "folder" in source:
        step = f" at step {source['step']}" if "step" in source else ""
        text.append(f"  {source['folder']}{step}")
    text.append(f"\n{found.tokens} tokens" + (f" of {source['text']}" if "text" in source else ""))
    if found.loss is not None:
        text.append(f", loss {found.loss:.4f}")
    return text


def rows(found: Inspection) -> Iterator[tuple[str, str, Values]]:
    """Measurement, stream and values by depth or by sublayer."""
    several = len(found.streams) > 1
    for name, values in found.rms.items():
        yield "hidden rms", name, values
    for name, values in (found.gradients or {}).items():
        yield "gradient norm", name, values
    for name, values in found.updates.items():
        yield "update / stream", name, values
    if several:
        for name in found.streams:
            yield "gain share at reads", name, [(read.gain_shares or {}).get(name) for read in found.reads]
        for name in found.streams:
            yield "contribution to reads", name, [(read.contributions or {}).get(name) for read in found.reads]
    if found.lens is not None:
        for name, values in (found.lens.alone or {}).items():
            yield "logit lens", name, values
        if several:
            yield "logit lens", "all", found.lens.together
    for name, peaks in found.peaks.items():
        yield "max / median", name, [peak.ratio for peak in peaks]
    if found.removal is not None:
        yield "loss rise without", "sublayer", found.removal.sublayers
        yield "loss rise without", "block", found.removal.blocks


def profile(found: Inspection, width: int) -> Table:
    """First and last value with a sparkline between them."""
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column("")
    table.add_column("stream", no_wrap=True)
    table.add_column("first", justify="right", no_wrap=True)
    table.add_column("by depth", style="cyan", no_wrap=True)
    table.add_column("last", justify="right", no_wrap=True)
    before = ""
    for name, stream, values in rows(found):
        first, last = (number(values[at]) for at in (0, -1))
        table.add_row("" if name == before else name, stream, first, bars(values, width), last)
        before = name
    return table


def bars(values: Values, width: int) -> str:
    """A sparkline, logarithmic for positive values of a wide range; nothing where a value is missing."""
    known = [value for value in values if value is not None]
    if len(known) < len(values) or not known:
        return ""
    if min(known) > 0 and max(known) / min(known) > WIDE_RANGE:
        known = [math.log(value) for value in known]
    return sparkline(known, width)


def notes(found: Inspection) -> Iterator[tuple[str, str]]:
    """What stands out, a line each."""
    is_pair = found.streams == ("x", "y")
    if found.fusion.gains is not None:
        paper = f" (paper, 1.3B: {by_stream(PAPER['gains'])})" if is_pair else ""
        yield "final gains", by_stream(found.fusion.gains) + paper
    if found.lens is not None and found.lens.alone is not None and len(found.streams) > 1:
        ends = {name: values[-1] for name, values in found.lens.alone.items()}
        paper = f" (paper, 1.3B: {by_stream(PAPER['lens'], percent)})" if is_pair else ""
        yield "predicted by one alone", by_stream(ends, percent) + paper
    depths = len(found.similarity.depths)
    yield "effective depth", by_stream(found.similarity.effective_depth) + f" of {depths}"
    yield "massive activations", massive(found)
    if found.removal is not None:
        order = sorted(found.sublayers, key=lambda s: -(found.removal.sublayers[s.index] or 0.0))  # type: ignore[union-attr]
        named = [f"{s.label} {rise(found.removal.sublayers[s.index])}" for s in order]
        yield "needed most", ", ".join(named[:STAND_OUT])
        if len(named) > STAND_OUT:
            yield "needed least", ", ".join(named[STAND_OUT:][: -STAND_OUT - 1 : -1])


def massive(found: Inspection) -> str:
    """The largest activation against its median, and how many are massive."""
    largest = [
        (peak.ratio or 0.0, name, depth, peak)
        for name, peaks in found.peaks.items()
        for depth, peak in enumerate(peaks)
        if peak.largest is not None
    ]
    if not largest:
        return "no number"
    ratio, name, depth, peak = max(largest, key=lambda entry: entry[:3])
    count = sum(each.massive for _, _, _, each in largest)
    where = f"stream {name}, depth {depth}, feature {peak.dims[0]}, {token(peak.tokens[0])}"
    return f"{count or 'none'}; largest {number(peak.largest)} = {ratio:.0f} medians: {where}"


def token(place: Sequence[int]) -> str:
    """Where a token stands: in a sequence of the batch, where it has two coordinates."""
    if len(place) == 2:
        return f"sequence {place[0]}, token {place[1]}"
    return f"token {', '.join(map(str, place))}"


def by_stream(values: Mapping[str, float | None], write: Callable[[float | None], str] | None = None) -> str:
    """``x 1.05, y 0.42``."""
    write = write or number
    return ", ".join(f"{name} {write(value)}" for name, value in values.items())


def number(value: float | None) -> str:
    """Three digits."""
    if value is None:
        return "–"
    return f"{value:.3g}" if abs(value) < 1000 else f"{value:,.0f}"


def percent(value: float | None) -> str:
    """Such as 42.6 %."""
    return "–" if value is None else f"{100 * value:.1f} %"


def rise(value: float | None) -> str:
    """A difference with its sign."""
    return "–" if value is None else f"{value:+.3f}"
