"""What topologies took: time, processor time and memory, the median over their runs, against the baseline."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import dataclass

from siamesenorm.lab.report.records import Records, Run


@dataclass(frozen=True)
class Cost:
    """What a topology took, the median over its runs, and against the baseline."""

    topology: str
    setting: str
    step_seconds: float | None
    processor_seconds: float | None
    """Per step, with evaluation and start."""
    memory_bytes: float | None
    """Above the idle process."""
    step_ratio: float | None = None
    processor_ratio: float | None = None
    memory_ratio: float | None = None


def costs(records: Records, baseline: str) -> list[Cost]:
    """Of every topology in every setting."""
    found = []
    for setting in records.groups:
        base = _cost(records, baseline, setting)
        for topology in records.topologies:
            cost = _cost(records, topology, setting)
            if cost is None:
                continue
            found.append(
                Cost(
                    topology,
                    setting,
                    cost[0],
                    cost[1],
                    cost[2],
                    *(_ratio(mine, theirs) for mine, theirs in zip(cost, base or (None,) * 3, strict=True)),
                )
            )
    return found


def _cost(records: Records, topology: str, setting: str) -> tuple[float | None, float | None, float | None] | None:
    """Medians of step time, processor time a step, and memory."""
    runs = [r for r in records.runs if (r.topology, records.setting(r)) == (topology, setting)]
    if not runs:
        return None
    return (
        _median([r.step_seconds for r in runs]),
        _median([_processor(r) for r in runs]),
        _median([_memory(r) for r in runs]),
    )


def _processor(run: Run) -> float | None:
    """Seconds a step; a run that ended early has spent too much of them on its start."""
    seconds = run.facts.get("processor_seconds")
    return seconds / run.step if seconds and run.step == run.config.steps else None


def _memory(run: Run) -> float | None:
    return run.facts.get("memory_bytes") or None


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _ratio(mine: float | None, theirs: float | None) -> float | None:
    return None if mine is None or not theirs else mine / theirs
