"""What evaluations found along the way: a held-out number by steps, for every topology and learning rate."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass
from statistics import fmean

from siamesenorm.lab.report.records import Records

METRICS = {"frechet": "Fréchet distance of samples, in the features of a small classifier (not FID)"}
"""Numbers that say more over time than at the end alone, and what they are."""


@dataclass(frozen=True)
class StepLine:
    """Means over seeds, at the steps that all of them reached."""

    topology: str
    setting: str
    lr: float
    values: dict[int, float]


def by_steps(records: Records, metric: str) -> list[StepLine]:
    """A line for every topology, setting and learning rate whose runs were asked for the metric."""
    found: dict[tuple[str, str, float], list[dict[int, float]]] = defaultdict(list)
    for run in records.runs:
        values = {step: numbers[metric] for step, numbers in run.evaluations if metric in numbers}
        if values:
            found[run.topology, records.setting(run), run.lr].append(values)
    lines = []
    for (topology, setting, lr), runs in found.items():
        steps = sorted(set.intersection(*(set(values) for values in runs)))
        lines.append(StepLine(topology, setting, lr, {step: fmean(values[step] for values in runs) for step in steps}))
    return lines


def measured(records: Records) -> list[str]:
    """The metrics of `METRICS` that these runs have."""
    return [metric for metric in METRICS if by_steps(records, metric)]


def table(lines: list[StepLine]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
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
