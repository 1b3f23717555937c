"""Tables, bars and sparklines on a terminal, all of one look."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from rich.console import Console, RenderableType
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn
from rich.table import Table

BARS = "▁▂▃▄▅▆▇█"


def plain_table(*headers: str, words: int = 1, name: str = "", **column: Any) -> Table:
    """A table with these columns, the first `words` of them left-aligned; more columns may be added.

    name: style of the first column. column: what every column gets, such as ``no_wrap=True``.
    """
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for number, header in enumerate(headers):
        table.add_column(header, justify="right" if number >= words else "left", style="" if number else name, **column)
    return table


def rows_table(rows: Iterable[Sequence[RenderableType]] = ()) -> Table:
    """Rows without headers; more may be added."""
    table = Table.grid(padding=(0, 2, 0, 0))
    for row in rows:
        table.add_row(*row)
    return table


def with_unit(number: float) -> str:
    """Three digits and a unit: 31.2k, 1.28B."""
    for size, unit in ((1e12, "T"), (1e9, "B"), (1e6, "M"), (1e3, "k")):
        if number >= size:
            return f"{number / size:.3g}{unit}"
    return f"{number:.3g}"


def sparkline(values: Sequence[float], width: int = 8) -> str:
    """Values as a row of bars, the last `width` parts of equal length, high losses high."""
    if not values:
        return ""
    size = max(1, -(-len(values) // width))
    parts = [values[start : start + size] for start in range(0, len(values), size)]
    means = [sum(part) / len(part) for part in parts]
    low, high = min(means), max(means)
    if high - low < 1e-12:
        return BARS[0] * len(means)
    return "".join(BARS[round((mean - low) / (high - low) * (len(BARS) - 1))] for mean in means)


@contextlib.contextmanager
def progress_bar(console: Console, title: str, shown: bool = True) -> Iterator[Callable[[float, float | None], None]]:
    """A bar for as long as the block runs, nothing where no one looks; call what it gives with how much of how much."""
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    visible = shown and console.is_terminal and not console.quiet
    with Progress(*columns, console=console, transient=True, disable=not visible) as bar:
        task = bar.add_task(title, total=None)
        yield lambda done, of: bar.update(task, completed=done, total=of)


@contextlib.contextmanager
def counting_bar(console: Console, title: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """A bar whose function is called with how many more are done."""
    done = 0
    with progress_bar(console, title) as show:

        def more(count: int) -> None:
            nonlocal done
            done += count
            show(done, total)

        yield more
