"""A self-contained HTML page with plots: opens offline, asks for nothing, light and dark, readable on a phone.

page = Page("Comparison", "three topologies")
page.heading("Verdict").bullets(["…"]).plot("curves", "Loss", "How to read it.", {"data": [...], "layout": {...}})
Path("report.html").write_text(page.render(), encoding="utf-8")

Every text that comes in is escaped, and inside figures too. The page's own scripts are named by their hashes in its
content security policy, so that a browser runs nothing else and fetches nothing.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import html
import importlib
import json
from collections.abc import Iterable, Mapping, Sequence
from importlib import resources
from typing import Any, NamedTuple

from siamesenorm.lab.drawing.style import SCRIPT, STYLE

Figure = dict[str, Any]
"""A plotly figure as plain data: ``data`` and ``layout``. Colours of text and background are the page's business."""

PALETTE = ("#3b82f6", "#f97316", "#10b981", "#d946ef", "#eab308", "#06b6d4", "#ef4444", "#8b5cf6", "#84cc16", "#94a3b8")
"""Colours that are legible on light and on dark."""


class Card(NamedTuple):
    """A number that answers a question, and what to know of it."""

    title: str
    value: str
    lines: Sequence[str]
    colour: str


class Page:
    """Collects the parts of a page, top to bottom; every method returns the page."""

    def __init__(self, title: str, about: str = "") -> None:
        self.title, self.about = title, about
        self.parts: list[str] = []
        self.figures: dict[str, Figure] = {}

    def heading(self, text: str) -> Page:
        """The heading of a section."""
        self.parts.append(f"<h2>{escape(text)}</h2>")
        return self

    def paragraph(self, text: str, kind: str = "") -> Page:
        """A paragraph; of the kind ``note`` or ``warning`` it is set apart."""
        self.parts.append(f'<p class="{escape(kind)}">{escape(text)}</p>' if kind else f"<p>{escape(text)}</p>")
        return self

    def bullets(self, texts: Iterable[str], kind: str = "") -> Page:
        """A list; of the kind ``verdict`` it stands out."""
        items = "".join(f"<li>{escape(text)}</li>" for text in texts)
        self.parts.append(f'<ul class="{escape(kind)}">{items}</ul>' if items else "")
        return self

    def cards(self, cards: Iterable[Card]) -> Page:
        """Numbers side by side, each in large type."""
        shown = []
        for card in cards:
            lines = "".join(f"<span>{escape(text)}</span>" for text in card.lines)
            shown.append(
                f'<div class="card" style="border-top-color:{escape(card.colour)}"><h3>{escape(card.title)}</h3>'
                f"<strong>{escape(card.value)}</strong>{lines}</div>"
            )
        self.parts.append(f'<div class="cards">{"".join(shown)}</div>' if shown else "")
        return self

    def facts(self, pairs: Iterable[tuple[str, str]]) -> Page:
        """Names and what they are."""
        shown = "".join(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in pairs)
        self.parts.append(f'<dl class="facts">{shown}</dl>')
        return self

    def table(
        self,
        headers: Sequence[str],
        rows: Iterable[Sequence[str]],
        *,
        caption: str = "",
        words: int = 1,
        folded: str = "",
    ) -> Page:
        """A table; all but the first `words` columns are set as numbers. folded: behind a line that says this."""
        # Where it is wider than the screen it scrolls, by keys too, with a shade at the side where more is.
        table = f'<div class="wide" tabindex="0">{html_table(headers, rows, caption, words)}</div>'
        self.parts.append(f"<details><summary>{escape(folded)}</summary>{table}</details>" if folded else table)
        return self

    def plot(self, name: str, title: str, about: str, figure: Figure, *, height: int = 420, half: bool = False) -> Page:
        """A plot with its heading and a sentence to read it by. half: on a wide screen, beside another such."""
        if name in self.figures:
            raise ValueError(f"the plot {name!r} is there already; every plot has a name of its own")
        self.figures[name] = figure
        self.parts.append(
            f'<figure class="{"half" if half else "full"}"><h3>{escape(title)}</h3>'
            f'<div class="plot" id="plot-{escape(name)}" role="img" '
            f'aria-label="{escape(title)}" style="height:{int(height)}px"></div>'
            f"<figcaption>{escape(about)}</figcaption></figure>"
        )
        return self

    def details(self, summary: str, text: str) -> Page:
        """Text as it is, folded away."""
        self.parts.append(f"<details><summary>{escape(summary)}</summary><pre>{escape(text)}</pre></details>")
        return self

    def render(self) -> str:
        """The whole page."""
        library = plotly_script() if self.figures else ""
        scripts = [script for script in (library, SCRIPT) if script]
        policy = (
            "default-src 'none'; style-src 'unsafe-inline'; img-src data: blob:; "
            f"script-src {' '.join(_hash(script) for script in scripts)}; base-uri 'none'; form-action 'none'"
        )
        about = f'<p class="about">{escape(self.about)}</p>' if self.about else ""
        return "".join(
            (
                '<!doctype html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n',
                f'<meta http-equiv="Content-Security-Policy" content="{html.escape(policy)}">\n',
                '<meta name="viewport" content="width=device-width, initial-scale=1">\n',
                f'<meta name="color-scheme" content="light dark">\n<title>{escape(self.title)}</title>\n',
                f"<style>{STYLE}</style>\n</head>\n<body>\n<main>\n",
                f'<header><h1>{escape(self.title)}</h1><button id="theme" type="button" hidden></button></header>\n',
                about,
                "\n".join(self.parts),
                "\n</main>\n",
                f'<script type="application/json" id="figures">{script_json(self.figures)}</script>\n',
                *(f"<script>{script}</script>\n" for script in scripts),
                "</body>\n</html>\n",
            )
        )


def html_table(headers: Sequence[str], rows: Iterable[Sequence[str]], caption: str = "", words: int = 1) -> str:
    """A table as HTML; all but the first `words` columns are set as numbers."""

    def line(cells: Iterable[str]) -> str:
        return f"<tr>{''.join(cells)}</tr>"

    head = line(f"<th{_side(n, words)}>{escape(text)}</th>" for n, text in enumerate(headers))
    body = "".join(line(f"<td{_side(n, words)}>{breakable(text)}</td>" for n, text in enumerate(row)) for row in rows)
    below = f"<caption>{escape(caption)}</caption>" if caption else ""
    return f"<table>{below}<thead>{head}</thead><tbody>{body}</tbody></table>"


def escape(text: object) -> str:
    """Text as HTML that shows it."""
    return html.escape(str(text), quote=True)


def breakable(text: object) -> str:
    """The same, which a narrow screen may break between the options of a topology and the parts of a path."""
    shown = escape(text)
    for sign in ":,/":
        shown = shown.replace(sign, f"{sign}<wbr>")
    return shown


def label(text: object) -> str:
    """Text for a plot, where plotly would take some tags for its own."""
    return html.escape(str(text), quote=False)


def script_json(value: Any) -> str:
    """JSON that may stand inside a script element: nothing in it can end the element or begin a comment."""
    text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    for sign in "<>&\u2028\u2029":
        text = text.replace(sign, f"\\u{ord(sign):04x}")
    return text


def as_figures(plain: Mapping[str, Figure]) -> dict[str, Any]:
    """Figures of plotly, which show themselves in a notebook."""
    shown = importlib.import_module("plotly.graph_objects").Figure
    return {name: shown(figure) for name, figure in plain.items()}


@functools.lru_cache(maxsize=1)
def plotly_script() -> str:
    """plotly.js, as the plotly package brings it."""
    file = resources.files("plotly") / "package_data" / "plotly.min.js"
    return file.read_text(encoding="utf-8").replace("</script", "<\\/script")


def _hash(script: str) -> str:
    digest = hashlib.sha256(script.encode()).digest()
    return f"'sha256-{base64.b64encode(digest).decode()}'"


def _side(number: int, words: int) -> str:
    return "" if number < words else ' class="number"'
