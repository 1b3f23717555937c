"""Where a run stands: what it saves and goes on from, what it says of itself, and how it ends."""

from __future__ import annotations

import contextlib
import signal
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from siamesenorm.data.reading import first_of
from siamesenorm.errors import ConfigError
from siamesenorm.tasks.metrics import LEAST
from siamesenorm.train.checkpoint.manifest import CheckpointError
from siamesenorm.train.checkpoint.store import CheckpointStore
from siamesenorm.train.display import Display
from siamesenorm.train.divergence import DivergenceMonitor
from siamesenorm.train.engine import Engine
from siamesenorm.train.folder import CHECKPOINTS, WEIGHTS, Count, RunFolder, State
from siamesenorm.train.recorder import Recorder


@dataclass(frozen=True)
class Result:
    """How a run, or this part of it, ended."""

    state: State
    step: int
    loss: float | None
    message: str
    folder: Path
    evaluation: dict[str, float] = field(default_factory=dict)
    signal: signal.Signals | None = None


class RunProgress:
    """One process's account of a run: its step, the numbers of that step, and the checkpoints behind it.

    changed: what is not as it was when the run was begun or last resumed.
    keep_state: whether a finished run leaves a checkpoint of its last step beside its weights.
    """

    def __init__(
        self,
        engine: Engine,
        folder: RunFolder,
        display: Display,
        changed: Sequence[str] = (),
        *,
        remarks: Sequence[str] = (),
        keep_state: bool = True,
    ) -> None:
        config, task, world = engine.config, engine.task, engine.world
        self.config, self.task, self.world, self.engine, self.folder = config, task, world, engine, folder
        self.changed, self.remarks, self.keep_state = changed, remarks, keep_state
        self.recorder = world.agree(lambda: Recorder(config, task, folder, world, display))
        chance_loss = world.agree(task.chance_loss)
        self.monitor = DivergenceMonitor(config.divergence, config.schedule.warmup, chance_loss, task.chance)
        self.store = CheckpointStore(folder.path / CHECKPOINTS, config.checkpoint.keep, world, report=self._not_saved)
        self.held_out = task.held_out_sizes()
        self.step, self.seconds = 0, 0.0
        self.loss: float | None = None
        self.evaluation: dict[str, float] = {}
        self.saved: int | None = None
        self.problem: str | None = None

    def close(self) -> None:
        """Let go of files and threads, however the run ended."""
        self.store.finish()
        self.recorder.close()

    # The beginning ---------------------------------------------------------------------------------------

    def begin(self, at: int | None = None) -> None:
        """Go on from the newest checkpoint, or from that of a step, and say what there is to know beforehand."""
        self.restore(at)
        self.world.agree(lambda: self.recorder.start(self.step, self.engine))
        self.world.agree(lambda: self.status("running"))
        for kind, sentence in self._notes():
            self.note(kind, sentence)

    def _notes(self) -> Iterator[tuple[str, str]]:
        config, engine = self.config, self.engine
        for sentence in config.notes if self.step == 0 else ():
            yield "recipe", sentence
        for sentence in self.changed:
            yield "changed", sentence
        for sentence in self.remarks:
            yield "init_from", sentence
        if engine.micro.count > 1:
            yield "micro_batch", engine.micro.sentence()
        if config.train.parameters != "all":
            yield "parameters", engine.trained.sentence(config.train.parameters)
        for sentence in self.task.notes():
            yield "data", sentence
        for of, size in self.held_out.items():
            if size < LEAST[of]:
                few = f"{size:,} {of} to measure on are too few to tell runs apart; it takes {LEAST[of]:,}"
                yield "held_out", few
        if engine.compiled and self.step < config.steps:
            yield "compile", "blocks are compiled in the first step; that takes up to a minute, once"
        if engine.precision.tf32:
            yield "tf32", "fp32 matrix products run in TF32; train.tf32=false has them in full precision"

    # Checkpoints -----------------------------------------------------------------------------------------

    def save(self, wait: bool = False) -> bool:
        """Begin to write a checkpoint of this step; the metrics up to it are on the disk before. False if it failed."""
        self.recorder.sync()
        self.problem = None
        every = self.config.checkpoint.permanent
        permanent = every is not None and self.step % every == 0
        succeeded = self.store.save(self.step, self.engine.state(self._written()), wait, permanent)
        self.saved = self.step
        self.status("running")
        return succeeded

    def _written(self) -> dict[str, Any]:
        return {
            "step": self.step,
            "loss": self.loss,
            "seconds": self.seconds,
            "evaluation": self.evaluation,
            "monitor": self.monitor.state(),
        }

    def restore(self, at: int | None = None) -> bool:
        """Go on from the newest complete checkpoint, or from that of a step; without one, from the first step."""
        checkpoint = self.store.latest(at)
        if checkpoint is None:
            source = self.config.train.init_from
            message = "" if source is None else f"began with the weights of {source}"
            self.world.agree(lambda: self._go_on_from(0, "started", message))
            return False
        progress = self.store.load(checkpoint, self.engine.state({}))
        check_progress(progress, checkpoint.folder)
        self.engine.restored(progress)
        self.monitor.load(progress.get("monitor", {}))
        self.step, self.loss = int(progress["step"]), progress.get("loss")
        self.seconds, self.evaluation = float(progress.get("seconds", 0)), progress.get("evaluation") or {}
        self.saved = self.step
        message = f"resumed at step {self.step}" if at is None else self._make_newest()
        self.world.agree(lambda: self._go_on_from(self.step, "resumed", message))
        return True

    def _make_newest(self) -> str:
        """A return to an older checkpoint: from now on it is the newest. What is said of it.

        Metrics are copied before and cut afterwards, so that a kill in between leaves all of them.
        """
        aside = self.world.agree(lambda: self.folder.keep_aside(self.step) if self.world.is_main else None)
        if not self.save(wait=True):
            raise ConfigError.refused(
                "--at", self.step, "its checkpoint could not be written as the newest", when="now"
            )
        message = f"went back to step {self.step}"
        if aside is None:
            return message
        return f"{message}; metrics of the steps behind it are kept in {aside.relative_to(self.folder.path)}"

    def _go_on_from(self, step: int, event: str, message: str) -> None:
        self.recorder.rewind(step)
        self.note(event, message, step)

    def _not_saved(self, sentence: str) -> None:
        """A save has failed, or a checkpoint was found damaged."""
        self.problem = sentence
        self.note("checkpoint", sentence)

    # The end ---------------------------------------------------------------------------------------------

    def end(self, state: State, message: str = "", *, received: signal.Signals | None = None) -> Result:
        """Save what there is to save and say how it ended; received: the signal that ended it."""
        succeeded, facts = True, {}
        if state == "diverged":
            message = f"diverged at step {self.step + 1}: {message}"
        elif self.saved != self.step and (self.keep_state or state != "finished"):
            succeeded = self.save(wait=True)
        succeeded = self.store.finish() and succeeded
        if state == "finished":
            facts = self.world.agree(self._export)  # which goes through all matrices, whatever becomes of the file
            message = f"finished {self.step} steps"
        if received is not None:
            message = f"{received.name}: saved at step {self.step}; the same command goes on from here"
            if not succeeded:
                message = f"{received.name}: step {self.step} was not saved; the same command goes on from before it"
        self.note(state, message)
        self.status(state, message=message, **facts)
        return Result(state, self.step, self.loss, message, self.folder.path, self.evaluation, received)

    def fail(self, error: OSError) -> None:
        """Record what the system refused, as far as it still lets us."""
        reason = f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
        with contextlib.suppress(OSError):
            self.status("failed", message=f"step {self.step}: {reason}; the same command goes on from the last save")

    def _export(self) -> dict[str, Any]:
        """Write the weights and what they need beside them; what status.json says of them."""
        written = self.engine.export(self.folder.path / WEIGHTS)
        if written is None:
            return {}
        self.task.save_extras(self.folder.path)
        return {"weights": written.model_dump()}

    # What is said of it ----------------------------------------------------------------------------------

    def status(self, state: State, **facts: Any) -> None:
        """Write status.json."""
        if self.problem is not None:
            facts["problem"] = self.problem
        self.recorder.status(
            state,
            step=self.step,
            steps=self.config.steps,
            loss=self.loss,
            evaluation=self.evaluation,
            higher_is_better=self.task.directions(self.evaluation),
            held_out=self.held_out,
            chance_loss=self.monitor.chance_loss,
            parameters=asdict(self.engine.trained),
            seconds=round(self.seconds, 3),
            **facts,
        )

    def note(self, kind: str, message: str, step: int | None = None) -> None:
        """Something happened at this step, or at another."""
        self.recorder.note(kind, self.step if step is None else step, message)


class _Written(BaseModel):
    model_config = ConfigDict(extra="allow", strict=True)  # a loss may be no number


class _Monitor(_Written):
    losses: list[float] = Field(default_factory=list)
    spikes: Count = 0
    skipped: Count = 0
    rollbacks: Count = 0


class _Progress(_Written):
    step: Count
    sample: Count
    loss: float | None = None
    seconds: float = 0
    evaluation: dict[str, float | None] = Field(default_factory=dict)
    monitor: _Monitor = _Monitor()
    precision: dict[str, float | None] = Field(default_factory=dict)


def check_progress(progress: dict[str, Any], folder: Path) -> None:
    """Raise where a run could not go on from what a checkpoint says."""
    try:
        _Progress.model_validate(progress)
    except ValidationError as error:
        raise CheckpointError(f"checkpoint: {str(folder)!r} is damaged at {first_of(error)}") from None
