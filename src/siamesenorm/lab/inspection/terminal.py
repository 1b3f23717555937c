"""An inspection on the terminal: every measurement a row with a sparkline over depth, then what stands out."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from siamesenorm.lab.inspection.result import Inspection
from siamesenorm.terminal import plain_table, rows_table, sparkline

SPARK = 36
"""Signs of a sparkline at most."""
WIDE_RANGE = 30.0
"""Ratio of the largest to the smallest value from which on a sparkline is logarithmic."""
STREAMS = 6
"""Streams that have rows of their own at most; inspection.json has all."""
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
    console.print(rows_table((Text(name, style="dim"), Text(text)) for name, text in notes(found)))


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
    """Measurement, stream and values by depth or by sublayer; of many streams, some."""
    several, shown = len(found.streams) > 1, some(found.streams, STREAMS)
    for name in shown:
        yield "hidden rms", name, found.rms[name]
    for name in shown if found.gradients is not None else ():
        yield "gradient norm", name, found.gradients[name]  # type: ignore[index]
    for name in shown:
        yield "update / stream", name, found.updates.get(name, ())
    if several:
        for name in shown:
            yield "gain share at reads", name, [(read.gain_shares or {}).get(name) for read in found.reads]
        for name in shown:
            yield "contribution to reads", name, [(read.contributions or {}).get(name) for read in found.reads]
    if found.collapse is not None:
        yield "largest stream's share", "all", found.collapse.largest
        yield "cosine of streams", "all", found.collapse.cosine
    if found.lens is not None:
        for name in shown if found.lens.alone is not None else ():
            yield "logit lens", name, found.lens.alone[name]  # type: ignore[index]
        if several:
            yield "logit lens", "all", found.lens.together
    for name in shown:
        yield "max / median", name, [None if peak is None else peak.ratio for peak in found.peaks[name]]
    if found.writers is not None:
        yield "embedding's share of reads", "", [row[0] for row in found.writers.shares]
    if found.attention_logits is not None:
        yield "largest attention logit", "", [value for value in found.attention_logits if value is not None]
    if found.removal is not None:
        yield "loss rise without", "sublayer", found.removal.sublayers
        yield "loss rise without", "block", found.removal.blocks


def some(names: Sequence[str], most: int) -> tuple[str, ...]:
    """At most so many, evenly spaced, the first and the last among them."""
    if len(names) <= most:
        return tuple(names)
    return tuple(names[index * (len(names) - 1) // (most - 1)] for index in range(most))


def profile(found: Inspection, width: int) -> Table:
    """First and last value with a sparkline between them."""
    table = plain_table()
    table.add_column("")
    table.add_column("stream", no_wrap=True)
    table.add_column("first", justify="right", no_wrap=True)
    table.add_column("by depth", style="cyan", no_wrap=True)
    table.add_column("last", justify="right", no_wrap=True)
    before = ""
    for name, stream, values in rows(found):
        if all(value is None for value in values):
            continue
        first, last = (number(value) for value in ends(values))
        table.add_row("" if name == before else name, stream, first, bars(values, width), last)
        before = name
    return table


def bars(values: Values, width: int) -> str:
    """A sparkline, logarithmic for positive values of a wide range; nothing where a value is missing in between.

    A stream that comes into being on the way has a shorter one.
    """
    there = [at for at, value in enumerate(values) if value is not None]
    if not there or len(there) < len(values) - there[0]:
        return ""
    known = [value for value in values if value is not None]
    if min(known) > 0 and max(known) / min(known) > WIDE_RANGE:
        known = [math.log(value) for value in known]
    return sparkline(known, width)


def ends(values: Values) -> tuple[float | None, float | None]:
    """The first value of a stream that may come into being on the way, and the last."""
    return next((value for value in values if value is not None), None), values[-1]


def notes(found: Inspection) -> Iterator[tuple[str, str]]:
    """What stands out, a line each."""
    is_pair = found.streams == ("x", "y")
    if len(found.streams) > STREAMS:
        yield "streams", f"{len(found.streams)}, of which {STREAMS} are shown; all are in inspection.json"
    if found.fusion.gains is not None:
        paper = f" (paper, 1.3B: {by_stream(PAPER['gains'])})" if is_pair else ""
        shown = some(tuple(found.fusion.gains), STREAMS)
        yield "final gains", by_stream({name: found.fusion.gains[name] for name in shown}) + paper
    if found.lens is not None and found.lens.alone is not None and len(found.streams) > 1:
        shown = some(tuple(found.lens.alone), STREAMS)
        predicted = {name: found.lens.alone[name][-1] for name in shown}
        paper = f" (paper, 1.3B: {by_stream(PAPER['lens'], percent)})" if is_pair else ""
        yield "predicted by one alone", by_stream(predicted, percent) + paper
    depths = len(found.similarity.depths)
    yield "effective depth", by_stream(found.similarity.effective_depth) + f" of {depths}"
    yield "massive activations", massive(found)
    if found.writers is not None:
        yield "writers of the output", largest_writers(found)
    if found.attention_logits is not None:
        logits = [
            (value, s) for s, value in zip(found.sublayers, found.attention_logits, strict=True) if value is not None
        ]
        value, where = max(logits, key=lambda entry: entry[0], default=(None, None))
        yield "largest attention logit", "no number" if where is None else f"{number(value)} in {where.label}"
    if found.spikes is not None:
        per = "" if found.spikes.per_10k is None else f", {number(found.spikes.per_10k)} in 10,000 steps"
        yield "spikes of the run", f"{found.spikes.count} in {found.spikes.counted} steps{per}"
    if found.removal is not None:
        order = sorted(found.sublayers, key=lambda s: -(found.removal.sublayers[s.index] or 0.0))  # type: ignore[union-attr]
        named = [f"{s.label} {rise(found.removal.sublayers[s.index])}" for s in order]
        yield "needed most", ", ".join(named[:STAND_OUT])
        if len(named) > STAND_OUT:
            yield "needed least", ", ".join(named[STAND_OUT:][: -STAND_OUT - 1 : -1])


def largest_writers(found: Inspection) -> str:
    """Those with the largest shares of what the stack puts out."""
    assert found.writers is not None
    names = ["embedding", *(sublayer.label for sublayer in found.sublayers)]
    shares = zip(found.writers.shares[-1], names, strict=True)
    order = sorted(shares, key=lambda entry: -(entry[0] or 0.0))
    return ", ".join(f"{name} {percent(share)}" for share, name in order[:STAND_OUT])


def massive(found: Inspection) -> str:
    """The largest activation against its median, and how many are massive."""
    largest = [
        (peak.ratio or 0.0, name, depth, peak)
        for name, peaks in found.peaks.items()
        for depth, peak in enumerate(peaks)
        if peak is not None and peak.largest is not None
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
