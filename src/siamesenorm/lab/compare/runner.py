"""Runs the cells of a grid in local processes: side by side, resumable, whatever becomes of one of them.

A cell is a run folder under ``cells/``. Finished and diverged ones are kept; one that was interrupted goes on from its
checkpoint. Processes come from a fork server that has imported torch once.
"""

from __future__ import annotations

import contextlib
import multiprocessing
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing import connection
from pathlib import Path
from typing import Any, Literal

from siamesenorm.data.listing import names_in
from siamesenorm.data.workers import available_cores, start_fork_server
from siamesenorm.errors import ConfigError, DataError
from siamesenorm.lab.compare.cell import CellOrder, run_cell, work
from siamesenorm.lab.compare.grid import Cell, fingerprint
from siamesenorm.train.folder import RunFolder
from siamesenorm.train.interruption import Interruption
from siamesenorm.train.provenance import threads_asked_for

CELLS = "cells"
PATIENCE = 30.0
"""Seconds that a cell has to save itself when it is asked to stop."""

CellState = Literal["waiting", "running", "finished", "diverged", "interrupted", "failed"]
DONE = ("finished", "diverged")


@dataclass
class CellProgress:
    """How one cell is getting on."""

    cell: Cell
    folder: Path
    state: CellState = "waiting"
    step: int = 0
    loss: float | None = None
    losses: list[float] = field(default_factory=list)
    """As they were reported, for a sparkline."""
    evaluation: dict[str, float] = field(default_factory=dict)
    message: str = ""
    kept: bool = False
    """Whether it was done before."""

    @property
    def steps(self) -> int:
        """All of them."""
        return self.cell.config.steps

    def update(self, message: dict[str, Any]) -> None:
        """Take in what its process says."""
        kind = message["kind"]
        if kind in ("started", "step"):
            self.step = int(message["step"])
        if kind == "step":
            self.loss = float(message["loss"])
            self.losses.append(self.loss)
        elif kind == "evaluation":
            self.evaluation = dict(message["metrics"])
        elif kind == "ended":
            self.state = message["state"]
        elif kind == "failed":
            self.state, self.message = "failed", str(message["message"])

    def read(self) -> None:
        """Take in what its folder says, if it is done or has failed."""
        status = RunFolder(self.folder).status()
        self.step = int(status.get("step") or self.step)
        self.loss = status.get("loss") if status.get("loss") is not None else self.loss
        self.evaluation = status.get("evaluation") or self.evaluation
        self.message = self.message or str(status.get("message", ""))


class GridWatcher:
    """Shows nothing; others show how the grid is getting on."""

    def changed(self, progress: CellProgress) -> None:
        """A cell has begun, gone on or ended."""

    def tick(self) -> None:
        """Some time has passed."""


def plan(cells: Sequence[Cell], out: Path) -> list[CellProgress]:
    """Where every cell stands; done ones are known by their folders. Raises before anything is written."""
    found = []
    for cell in cells:
        progress = CellProgress(cell, folder_of(cell, out / CELLS))
        run = RunFolder(progress.folder)
        run.check(cell.config, "auto")
        state = run.status().get("state")
        if state in DONE:
            progress.state, progress.kept = state, True
            progress.read()
        found.append(progress)
    return found


def folder_of(cell: Cell, cells: Path) -> Path:
    """Under the cell's name or, where an earlier version had another fingerprint for it, where the same run lies."""
    place, (readable, _, digest) = cells / cell.name, cell.name.rpartition("-")
    if place.exists() or not cells.is_dir():
        return place
    for name in names_in(cells):
        if re.fullmatch(rf"{re.escape(readable)}-[0-9a-f]{{8}}", name):
            with contextlib.suppress(ConfigError):
                if fingerprint(RunFolder(cells / name).config()) == digest:
                    return cells / name
    return place


class LocalEngine:
    """So many processes of this machine."""

    def __init__(self, jobs: int, threads: int | None = None, gpus: int = 0, model: str | None = None) -> None:
        if jobs < 1:
            raise ConfigError.not_allowed("--jobs", jobs, "1 or more")
        self.jobs, self.gpus, self.model = jobs, gpus, model
        self.threads = threads or threads_asked_for() or max(1, available_cores() // jobs)
        self.context: Any = multiprocessing.get_context("spawn" if sys.platform == "win32" else "forkserver")
        if sys.platform != "win32":
            # torch._dynamo: building a model on `meta` imports it, 1.7 s in every cell otherwise.
            late = ["torch._dynamo", "torch.utils.tensorboard"]
            self.context.set_forkserver_preload(["siamesenorm.lab.compare.cell", "siamesenorm.train.loop", *late])

    def run(self, plan: Sequence[CellProgress], provenance: dict[str, Any], watcher: GridWatcher) -> bool:
        """Run what is not done yet; False if it was interrupted, which has saved what was running."""
        waiting = [progress for progress in plan if progress.state not in DONE]
        running: dict[connection.Connection, tuple[Any, CellProgress, int]] = {}
        with Stopping() as stop:
            if sys.platform != "win32":
                start_fork_server()
            try:
                while running or (waiting and not stop.asked):
                    while waiting and len(running) < self.jobs and not stop.asked:
                        slot = min(set(range(self.jobs)) - {taken for *_, taken in running.values()})
                        running.update([self._start(waiting.pop(0), slot, provenance)])
                    if stop.asked and not stop.passed_on:
                        stop.passed_on = True
                        for process, *_ in running.values():
                            process.terminate()
                    for pipe in connection.wait(list(running), timeout=0.25):
                        process, progress, _ = running[pipe]  # type: ignore[index]
                        if not _receive(pipe, progress):
                            _end(process, progress, stop.asked)
                            del running[pipe]  # type: ignore[arg-type]
                        watcher.changed(progress)
                    watcher.tick()
            finally:
                for process, *_ in running.values():
                    process.kill()
                    process.join(PATIENCE)
        return not stop.asked

    def _start(
        self, progress: CellProgress, slot: int, provenance: dict[str, Any]
    ) -> tuple[Any, tuple[Any, CellProgress, int]]:
        ours, theirs = self.context.Pipe(duplex=False)
        gpu = slot % self.gpus if self.gpus else None
        order = CellOrder(
            progress.cell.config.as_dict(), str(progress.folder), provenance, self.threads, gpu, self.model
        )
        process = self.context.Process(target=work, args=(theirs, order), name=progress.cell.name)
        process.start()
        theirs.close()
        progress.state = "running"
        return ours, (process, progress, slot)


def _receive(pipe: Any, progress: CellProgress) -> bool:
    """Everything that has been said so far; False if nothing more will come."""
    try:
        while pipe.poll():
            progress.update(pipe.recv())
    except (EOFError, OSError):
        return False
    return True


def _end(process: Any, progress: CellProgress, stopping: bool) -> None:
    process.join(PATIENCE)
    if progress.state == "running":  # it ended without a word: killed, or it had no time to begin
        progress.state = "interrupted" if stopping else "failed"
        progress.message = f"its process ended with code {process.exitcode}"
    progress.read()


class ThisProcess:
    """One cell after the other in this process: for models that nobody else can make."""

    jobs = 1

    def run(self, plan: Sequence[CellProgress], provenance: dict[str, Any], watcher: GridWatcher) -> bool:
        """Run what is not done yet; False if it was interrupted, which has saved what was running."""
        for progress in plan:
            if progress.state in DONE:
                continue
            progress.state = "running"
            watcher.changed(progress)
            complete = self._run(progress, provenance, watcher)
            progress.read()
            watcher.changed(progress)
            if not complete:
                return False
        return True

    def _run(self, progress: CellProgress, provenance: dict[str, Any], watcher: GridWatcher) -> bool:
        import torch

        def send(message: dict[str, Any]) -> None:
            progress.update(message)
            watcher.tick()

        config, threads = progress.cell.config.as_dict(), torch.get_num_threads()
        order = CellOrder(config, str(progress.folder), provenance, threads, alone=False)
        try:
            progress.state = run_cell(order, send)
        except (ConfigError, DataError, OSError) as error:  # a defect in a user's model shows its own trace
            progress.update({"kind": "failed", "message": " ".join(str(error).split())})
        return progress.state != "interrupted"


class Stopping(Interruption):
    """The first Ctrl-C, SIGTERM or SIGHUP asks to stop and is passed on to the cells; a second Ctrl-C ends at once."""

    passed_on = False
