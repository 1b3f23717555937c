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
    runs: dict[tuple[str, str], list[Run]] = {}
    for setting in records.groups:
        for topology in records.topologies:
            same = [r for r in records.runs if (r.topology, records.setting(r)) == (topology, setting)]
            runs |= {(topology, setting): same} if same else {}
    taken = {key: _taken(same) for key, same in runs.items()}
    found = []
    for (topology, setting), mine in taken.items():
        base = taken.get((baseline, setting), (None, None, None))
        ratios = (one / other if one is not None and other else None for one, other in zip(mine, base, strict=True))
        found.append(Cost(topology, setting, *mine, *ratios))
    return found


def _taken(runs: Sequence[Run]) -> tuple[float | None, float | None, float | None]:
    """Medians of step time, processor time a step, and memory."""
    # A run that ended early has spent too much of its processor time on its start.
    whole = [run for run in runs if run.step and run.step == run.config.steps]
    processor = [seconds / run.step for run in whole if (seconds := run.facts.get("processor_seconds"))]
    memory = [size for run in runs if (size := run.facts.get("memory_bytes"))]
    times = [run.step_seconds for run in runs if run.step_seconds is not None]
    step, spent, used = (statistics.median(known) if known else None for known in (times, processor, memory))
    return step, spent, used
