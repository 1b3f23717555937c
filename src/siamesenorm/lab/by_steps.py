"""What evaluations found along the way: a held-out number by steps, for every topology and learning rate."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean

from rich.table import Table

from siamesenorm.lab.records import Records

METRICS = {"frechet": "Fréchet distance of samples, in the features of a small classifier (not FID)"}
"""Numbers that say more over time than at the end alone, and what they are."""


@dataclass(frozen=True)
class Line:
    """Means over seeds, at the steps that all of them reached."""

    topology: str
    setting: str
    lr: float
    values: dict[int, float]


def by_steps(records: Records, metric: str) -> list[Line]:
    """A line for every topology, setting and learning rate whose runs were asked for the metric."""
    found: dict[tuple[str, str, float], list[dict[int, float]]] = defaultdict(list)
    for run in records.runs:
        values = {step: numbers[metric] for step, numbers in run.evaluations if metric in numbers}
        if values:
            found[run.topology, records.setting(run), run.lr].append(values)
    lines = []
    for (topology, setting, lr), runs in found.items():
        steps = sorted(set.intersection(*(set(values) for values in runs)))
        lines.append(Line(topology, setting, lr, {step: fmean(values[step] for values in runs) for step in steps}))
    return lines


def measured(records: Records) -> list[str]:
    """The metrics of `METRICS` that these runs have."""
    return [metric for metric in METRICS if by_steps(records, metric)]


def table(lines: list[Line]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    """Headers and rows, a column for each step."""
    steps = sorted({step for line in lines for step in line.values})
    rows = [
        (
            f"{line.topology}, {line.setting}" if line.setting else line.topology,
            f"{line.lr:g}",
            *(f"{line.values[step]:.4g}" if step in line.values else "–" for step in steps),
        )
        for line in lines
    ]
    return ("topology", "lr", *(f"step {step}" for step in steps)), rows


def terminal_table(lines: list[Line]) -> Table:
    """The same for a terminal."""
    headers, rows = table(lines)
    made = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 2, 0, 0))
    for number, header in enumerate(headers):
        made.add_column(
            header, no_wrap=True, justify="right" if number else "left", style="" if number else "bold cyan"
        )
    for row in rows:
        made.add_row(*row)
    return made
