"""What a run says of itself while it goes on: metrics.jsonl, events, status, trackers and the screen.

Every process has a recorder, so that the loop need not ask which one it is; only the main process's writes.
"""

from __future__ import annotations

import contextlib
from typing import Any

from siamesenorm.tasks import Task
from siamesenorm.train.config import RunConfig
from siamesenorm.train.display import Display
from siamesenorm.train.distributed import World
from siamesenorm.train.engine import Engine, StepResult
from siamesenorm.train.folder import METRICS, MetricsFile, RunFolder, State
from siamesenorm.train.speed import Peak
from siamesenorm.train.trackers import Tracker, open_trackers


class Recorder:
    """Takes the steps, evaluations and events of a run to everywhere they are kept or shown."""

    def __init__(self, config: RunConfig, task: Task, run: RunFolder, world: World, display: Display) -> None:
        self.config, self.task, self.folder, self.world, self.display = config, task, run, world, display
        self.metrics = MetricsFile(run.path / METRICS) if world.is_main else None
        self.trackers: list[Tracker] = []
        self.peak: Peak | None = None

    def start(self, step: int, engine: Engine) -> None:
        """The run begins or goes on behind this step."""
        precision = engine.precision
        if self.world.is_main:
            self.trackers = open_trackers(self.config.logging, self.config, self.folder.path, step)
            self.peak = Peak.of(self.world, precision.dtype, self.config.logging.peak_flops, tf32=precision.tf32)
        self.display.start(step, self.config.steps)

    def step(
        self, step: int, computed: StepResult, lr: float, seconds: float, work: float, skipped: str | None
    ) -> None:
        """A step was taken or left out; work: its floating-point operations."""
        if self.metrics is None:
            return
        samples = self.config.train.batch_size * self.task.units_per_sample
        record: dict[str, Any] = {
            "step": step,
            "loss": computed.loss,
            "lr": lr,
            "grad_norm": computed.grad_norm,
            **computed.metrics,
            self.task.unit: step * samples,
            "seconds": round(seconds, 6),
        }
        if self.peak is not None and work:  # a user's own model does not say it
            record["mfu"] = round(self.peak.share(work / seconds), 5)
        if skipped:
            record["skipped"] = skipped
        self.metrics.write(record)
        if step % self.config.logging.every == 0 or step == self.config.steps:
            self._track(step, "train", {name: value for name, value in record.items() if name != "step"})
            self.display.step(record, self.task.unit, samples / seconds)

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Held-out data was measured."""
        if self.metrics is not None:
            self.metrics.write({"step": step, "evaluation": metrics})
            self.display.evaluation(step, metrics)
            self._track(step, "evaluation", metrics)

    def _track(self, step: int, kind: str, values: dict[str, Any]) -> None:
        for tracker in self.trackers:
            tracker.log(step, {f"{kind}/{name}": value for name, value in values.items()})

    def note(self, kind: str, step: int, message: str) -> None:
        """Something happened: a line in events.jsonl, and on the screen where there is something to say."""
        if self.world.is_main:
            with contextlib.suppress(OSError):  # a full disk is no reason to end: what happened is said on the screen
                self.folder.event(kind, step, message)
            if message:
                self.display.note(kind, message)

    def status(self, state: State, **facts: Any) -> None:
        """How the run stands."""
        if self.world.is_main:
            self.folder.write_status(state, **facts)

    def rewind(self, step: int) -> None:
        """Drop the metrics behind a step; the run goes on from there."""
        if self.metrics is not None:
            self.metrics.rewind(step)

    def sync(self) -> None:
        """Bring the metrics to the disk."""
        if self.metrics is not None:
            self.metrics.sync()

    def close(self) -> None:
        """Let go of files and the screen."""
        self.display.stop()
        for tracker in self.trackers:
            tracker.close()
        if self.metrics is not None:
            self.metrics.close()
