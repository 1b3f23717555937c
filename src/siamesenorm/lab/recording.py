"""Runs that were made elsewhere, in folders that `siamesenorm report` takes: a recorder for your own loop.

with siamesenorm.record("runs/mine/pre-0", topology="pre", lr=1e-3, seed=0) as run:
    for batch in batches:
        run.step(loss=loss.item())
    run.evaluate(loss=held_out)
"""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from siamesenorm.errors import ConfigError
from siamesenorm.tasks.own import OwnLanguageTask, OwnTask, Setting
from siamesenorm.train.facts import Facts
from siamesenorm.train.folder import METRICS, MetricsFile, RunFolder, State, read_metrics
from siamesenorm.train.recipes import parse_config

SECONDS = 5.0
"""Between two writings of status.json while a run goes on."""
ENDED = ("finished", "diverged")


def record(
    folder: Path | str,
    *,
    topology: str,
    lr: float,
    seed: int = 0,
    steps: int | None = None,
    batch_size: int = 1,
    tokens: int | None = None,
    samples: int | None = None,
    data: str = "",
    chance_loss: float | None = None,
    higher_is_better: Mapping[str, bool] | None = None,
    resume_from: int = 0,
    restart: bool = False,
    **settings: Setting,
) -> Recording:
    """Record a run of your own loop, so that `siamesenorm.report` can compare it with others.

    ::

        with siamesenorm.record("runs/mine/pre-0", topology="pre", lr=1e-3, seed=0, tokens=65536) as run:
            for batch in batches:
                ...
                run.step(loss=loss.item(), grad_norm=norm.item())
            run.evaluate(loss=held_out_loss)

    topology, lr, seed: its place among the others; runs of the same seed are taken for pairs.
    steps: how many there will be, where that is known; a run that ends before counts as interrupted.
    batch_size: samples of each.
    tokens or samples: how many of them `evaluate` measures on.
    data: the name of what it learnt from; a file or folder is recorded with its hash.
    chance_loss: the loss of knowing nothing of the input; a run that stays there has learnt nothing.
    higher_is_better: of numbers other than loss and accuracy, whether more is better.
    resume_from: steps of this run that have been recorded before; what was recorded behind them is dropped.
    restart: record anew where another run was recorded.
    settings: whatever else tells runs apart, such as ``depth=12``.

    Leaving the block ends the run: as finished, or as diverged where the last loss is no number or `diverged` was
    called. An exception leaves it as failed, Ctrl-C as interrupted; such a run can be recorded again in its folder.
    """
    if tokens is not None and samples is not None:
        raise ConfigError.not_allowed("samples", samples, "one of the two", f"beside tokens = {tokens}")
    task = OwnTask if tokens is None else OwnLanguageTask
    values = {
        "task": task.name,
        "model": {"topology": topology, "source": "recorded", "settings": settings},
        "data": {"train": data},
        "optimizer": {"lr": lr},
        "train": {"steps": 1 if steps is None else steps, "batch_size": batch_size, "seed": seed, "compile": False},
    }
    held_out = {"tokens": tokens, "samples": samples}
    directions = {name: metric.higher for name, metric in task.metrics.items() if metric.higher is not None}
    status = {
        "held_out": {name: int(size) for name, size in held_out.items() if size is not None},
        "chance_loss": chance_loss,
        "higher_is_better": {**directions, **(higher_is_better or {})},
    }
    return Recording(Path(folder), values, status, steps is not None, resume_from, restart)


class Recording:
    """One run of another loop; see `record`. status: what its status.json says beside how far it is."""

    def __init__(
        self,
        folder: Path,
        values: dict[str, Any],
        status: dict[str, Any],
        known_steps: bool,
        resume_from: int,
        restart: bool,
    ) -> None:
        self.run, self.values, self.status, self.known_steps = RunFolder(folder), values, status, known_steps
        self.config = parse_config(values)
        self.number, self.loss, self.evaluation = resume_from, math.nan, dict[str, float]()
        self.seconds, self.reason, self.message = 0.0, "", ""
        self.state: State = "running"
        self.restart = restart
        self.metrics: MetricsFile | None = None

    @property
    def folder(self) -> Path:
        """Where it is recorded."""
        return self.run.path

    # While it goes on ------------------------------------------------------------------------------------

    def start(self) -> Self:
        """Begin, or go on behind the steps that were recorded before; `with` does this."""
        there = {} if self.restart else self.run.status()
        if there and not self.known_steps:  # how many there are is known at the end
            self.values["train"]["steps"] = self.run.config().steps if self.run.exists else 1
            self.config = parse_config(self.values)
        self.run.check(self.config, "restart" if self.restart else "auto")
        if there.get("state") in ENDED:
            raise ConfigError(
                f"folder: {str(self.folder)!r} holds a run that is {there['state']}; give another, or restart=True"
            )
        lines = [] if self.restart else read_metrics(self.folder)
        losses = {line["step"]: line for line in lines if "loss" in line and line["step"] <= self.number}
        if self.number and not losses:
            raise ConfigError.refused("resume_from", self.number, f"no step is recorded in {str(self.folder)!r}")
        self.run.begin(self.config, "restart" if self.restart else "auto")
        self.facts = Facts(self.folder, self.config, alone=True)
        self.facts.begin(anew=self.restart)
        self.seconds = sum(line.get("seconds") or 0.0 for line in losses.values())
        if losses and (last := losses[max(losses)]["loss"]) is not None:  # none is how no number is written
            self.loss = float(last)
        self.metrics = MetricsFile(self.folder / METRICS)
        self.metrics.rewind(self.number)
        self.moment = self.written = time.monotonic()
        self._status("running")
        return self

    def step(self, loss: float, *, at: int | None = None, **numbers: float) -> None:
        """A step was taken; at: its number, where not every one is recorded; numbers: such as grad_norm or lr."""
        now, metrics = time.monotonic(), self._open()
        number = self.number + 1 if at is None else at
        if number <= self.number:
            raise ConfigError.not_allowed("at", number, f"a step behind {self.number}")
        if self.known_steps and number > self.config.steps:
            raise ConfigError.not_allowed("at", number, f"a step up to steps = {self.config.steps}")
        taken, spent = number - self.number, now - self.moment
        found = {name: as_number(name, value) for name, value in {"loss": loss, **numbers}.items()}
        self.number, self.loss, self.moment = number, found.pop("loss"), now
        self.seconds += spent
        metrics.write({"step": number, "loss": self.loss, **found, "seconds": round(spent / taken, 6)})
        if now - self.written >= SECONDS:
            self.written = now
            self._status("running")

    def evaluate(self, **numbers: float) -> None:
        """Held-out data were measured: loss, accuracy, or others that `higher_is_better` names; also behind the end."""
        over = self.metrics is None and self.state in ENDED
        metrics = MetricsFile(self.folder / METRICS) if over else self._open()
        self.evaluation = {name: as_number(name, value) for name, value in numbers.items()}
        metrics.write({"step": self.number, "evaluation": self.evaluation})
        if over:
            metrics.close()
            self._status(self.state, message=self.message)
        self.moment = time.monotonic()  # the time that this took is no step's

    def diverged(self, reason: str = "its author says so") -> None:
        """It counts as diverged, however it goes on."""
        self.reason = reason

    # The end ---------------------------------------------------------------------------------------------

    def end(self, state: State | None = None, message: str = "") -> None:
        """End as finished, as diverged where it is, or as said; leaving `with` does this."""
        if self.metrics is None:
            return
        if state is None and not self.reason and self.number and not math.isfinite(self.loss):
            self.reason = f"the loss is {self.loss}"
        early = self.known_steps and self.number < self.config.steps
        ended: State = state or ("diverged" if self.reason else "interrupted" if early else "finished")
        if not self.known_steps and self.number:
            self.values["train"]["steps"] = self.number
            self.config = parse_config(self.values)
            self.run.begin(self.config, "auto")
        if ended == "diverged":
            message = f"diverged at step {self.number}: {self.reason}"
        if ended == "interrupted" and not message:
            message = f"ended at step {self.number} of steps = {self.config.steps}"
        self.message = message or f"{ended} at step {self.number}"
        self._status(ended, message=self.message)
        self.facts.end(chance_loss=self.status["chance_loss"])
        self.metrics.close()
        self.metrics = None

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.end()
        elif isinstance(error, KeyboardInterrupt):
            self.end("interrupted")
        else:
            self.end("failed", f"{type(error).__name__}: {error}")

    def _open(self) -> MetricsFile:
        if self.metrics is None:
            raise ConfigError("record: the run has not begun or is over; it takes steps inside of the with block")
        return self.metrics

    def _status(self, state: State, **more: Any) -> None:
        self.state = state
        facts = {"step": self.number, "steps": self.config.steps, "loss": self.loss, "evaluation": self.evaluation}
        self.run.write_status(state, **facts, **self.status, seconds=round(self.seconds, 3), **more)


def as_number(name: str, value: Any) -> float:
    """A number, or a tensor or array of one."""
    try:
        return float(value)
    except (TypeError, ValueError, RuntimeError):
        raise ConfigError.not_allowed(name, value, "a number") from None
