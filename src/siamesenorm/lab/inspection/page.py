"""An inspection on disk: inspection.json with all numbers, inspection.html to look at."""

from __future__ import annotations

import json
from pathlib import Path

from siamesenorm.data.atomic import write_texts
from siamesenorm.lab.drawing.page import Page
from siamesenorm.lab.inspection.figures import plots
from siamesenorm.lab.inspection.result import Inspection
from siamesenorm.lab.inspection.terminal import STREAMS, by_stream, notes, number, percent, rise, some

JSON, HTML = "inspection.json", "inspection.html"


def write_report(found: Inspection, folder: Path) -> list[Path]:
    """Write both files into a folder, each whole or not at all; their paths, the page's last."""
    return write_texts(folder, {JSON: found.to_json(), HTML: make_page(found).render()})


def make_page(found: Inspection) -> Page:
    """What stands out, the plots, the numbers, and how to make it again."""
    source = found.source
    name = str(source.get("folder", found.topology))
    step = f" at step {source['step']}" if "step" in source else ""
    page = Page(
        f"Inside {Path(name).name or name}",
        f"{found.topology}, {found.blocks} blocks of width {found.dim}{step}; {found.tokens} tokens"
        + (f" of {source['text']}." if "text" in source else "."),
    )
    page.heading("At a glance")
    loss = [] if found.loss is None else [("loss", number(found.loss))]
    page.facts((*loss, *notes(found)))
    page.heading("By depth")
    for plot in plots(found):
        page.plot(plot.name, plot.title, plot.about, plot.figure, height=plot.height, half=plot.half)
    _numbers(page, found)
    page.heading("Make it again")
    if "command" in source:
        page.details("Command", str(source["command"]))
    page.details("Model, text, versions and machine", json.dumps(source, indent=1, ensure_ascii=False))
    return page


def _numbers(page: Page, found: Inspection) -> None:
    page.heading("Numbers")
    headers = ["sublayer", "rms", "update / stream", "gain share", "contribution", "lens"]
    removal, shown = found.removal, some(found.streams, STREAMS)
    rows = []
    for sublayer in found.sublayers:
        at, read = sublayer.index, found.reads[sublayer.index]
        alone = {} if found.lens is None else found.lens.alone or {}
        row = [
            sublayer.label,
            by_stream({name: found.rms[name][at + 1] for name in shown}),
            by_stream({name: found.updates[name][at] for name in shown}),
            by_stream({name: share for name, share in (read.gain_shares or {}).items() if name in shown}),
            by_stream({name: share for name, share in (read.contributions or {}).items() if name in shown}),
            by_stream({name: alone[name][at + 1] for name in shown if name in alone}, percent),
        ]
        rows.append([*row, *([] if removal is None else [rise(removal.sublayers[at])])])
    page.table(
        [*headers, *([] if removal is None else ["loss rise"])],
        rows,
        caption=f"Behind each sublayer. All numbers, with gradients, similarities and peaks: {JSON}, beside this page.",
        folded="Every sublayer",
    )
