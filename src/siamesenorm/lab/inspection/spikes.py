"""Loss spikes: steps whose loss lies above the median of the 201 steps around them by more than .1 (arXiv 2608.30320).

found = spikes_of_run("runs/mine")
found.per_10k, found.steps
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np

from siamesenorm.lab.inspection.result import Spikes
from siamesenorm.train.folder import read_metrics

WINDOW = 201
ABOVE = 0.1
CHUNK = 4096
"""Steps whose windows are in memory at once."""


def find_spikes(losses: Sequence[float | None], steps: Sequence[int] | None = None) -> Spikes:
    """Of the losses of consecutive steps; one that is no number is a spike.

    The window is centred: a hundred steps before, the step and a hundred after, fewer at either end.
    """
    named = np.arange(1, len(losses) + 1) if steps is None else np.asarray(steps, dtype=np.int64)
    values = np.array([np.nan if loss is None else loss for loss in losses], dtype=np.float64)
    values = np.where(np.isfinite(values), values, np.inf)
    half = WINDOW // 2
    padded = np.concatenate([np.full(half, np.nan), values, np.full(half, np.nan)])
    above = np.zeros(len(values), dtype=bool)
    for start in range(0, len(values), CHUNK):
        stop = min(start + CHUNK, len(values))
        windows = np.lib.stride_tricks.sliding_window_view(padded[start : stop + 2 * half], WINDOW)
        medians = np.nanmedian(windows, axis=1)
        above[start:stop] = (values[start:stop] > medians + ABOVE) | np.isinf(values[start:stop])
    count = int(above.sum())
    rate = 10_000 * count / len(values) if len(values) else None
    return Spikes(counted=len(values), count=count, per_10k=rate, steps=tuple(named[above].tolist()))


def spikes_of_run(folder: Path | str) -> Spikes | None:
    """Of the losses in a run's metrics.jsonl; None where it has none."""
    records = [record for record in read_metrics(folder) if "loss" in record]
    if not records:
        return None
    return find_spikes([record["loss"] for record in records], [record["step"] for record in records])
