"""What a grid would take: its cells, their time and memory, found out without writing anything."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import torch
from rich.table import Table
from rich.text import Text

from siamesenorm.lab.compare.engines import CellEngine
from siamesenorm.lab.compare.grid import Grid
from siamesenorm.lab.compare.own_model import check_own_models
from siamesenorm.lab.compare.runner import DONE, plan
from siamesenorm.terminal import plain_table
from siamesenorm.train.display import clock
from siamesenorm.train.dry_run import Estimate, estimate
from siamesenorm.train.planning.hardware import gib


def dry_run(grid: Grid, folder: Path, engine: CellEngine) -> Iterable[Table | str]:
    """Time one cell of every topology and setting; a table of them, and a sentence about all."""
    places = plan(grid.cells(), folder)
    check_own_models(places)
    waiting = [progress.cell for progress in places if progress.state not in DONE]
    kinds = {(cell.topology, " ".join(cell.settings)): cell for cell in reversed(waiting)}
    threads = torch.get_num_threads()
    torch.set_num_threads(getattr(engine, "threads", threads))
    try:
        found: dict[tuple[str, str], Estimate] = {kind: estimate(kinds[kind].config) for kind in reversed(kinds)}
    finally:
        torch.set_num_threads(threads)
    headers = ("topology", "setting", "cells", "parameters", "steps", "ms per step", "minutes")
    table = plain_table(*headers, words=2, name="bold cyan")
    total = 0.0
    for (topology, setting), one in found.items():
        count = sum((cell.topology, " ".join(cell.settings)) == (topology, setting) for cell in waiting)
        total += count * one.seconds
        numbers = (f"{count}", f"{one.parameters:,}", f"{one.steps:,}", f"{1000 * one.step_seconds:.3g}")
        table.add_row(Text(topology), Text(setting), *numbers, f"{count * one.seconds / 60:.1f}")
    yield table
    jobs = min(engine.jobs, max(1, len(waiting)))
    most = max((one.memory for one in found.values()), default=0.0)
    done = len(places) - len(waiting)
    yield (
        f"{len(places)} cells" + (f", of which {done} are done" if done else "") + f"; {jobs} at a time that is about "
        f"{clock(total / jobs)} on this machine without evaluations, and {gib(jobs * most)} of memory at least. "
        "Nothing was written."
    )
