"""A whole run: begin or resume, step after step, with evaluation, checkpoints, divergence and signals in between.

result = train(resolve("lm-tiny", ["steps=100"]), "runs/first")
result.state, result.loss, result.evaluation["perplexity"]
"""

from __future__ import annotations

import contextlib
import functools
import math
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from siamesenorm.errors import ConfigError
from siamesenorm.tasks import Task, find_task
from siamesenorm.tasks.metrics import LEAST
from siamesenorm.train.branching import checkpoint_at
from siamesenorm.train.checkpoint import CheckpointStore
from siamesenorm.train.config import RunConfig
from siamesenorm.train.display import Display, QuietDisplay
from siamesenorm.train.distributed import World
from siamesenorm.train.divergence import DivergenceMonitor, Verdict, locate
from siamesenorm.train.engine import Engine, StepResult
from siamesenorm.train.epochs import in_steps
from siamesenorm.train.facts import Facts
from siamesenorm.train.folder import CHECKPOINTS, WEIGHTS, Mode, RunFolder, State
from siamesenorm.train.interruption import Interruption
from siamesenorm.train.memory import check_memory
from siamesenorm.train.progress import check_progress
from siamesenorm.train.recorder import Recorder
from siamesenorm.train.resuming import changes
from siamesenorm.train.starting import starting_weights
from siamesenorm.train.trackers import check_trackers
from siamesenorm.train.weights import check_weights


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


def train(
    config: RunConfig,
    folder: Path | str,
    *,
    mode: Mode = "auto",
    display: Display | None = None,
    world: World | None = None,
    provenance: dict[str, Any] | None = None,
    alone: bool = True,
    at: int | None = None,
    keep_state: bool = True,
) -> Result:
    """Train a configuration in a folder, from its newest checkpoint if there is one.

    mode: ``auto`` begins or resumes, ``resume`` wants something to resume, ``restart`` begins anew.
    at: go on from an older checkpoint, that of this step; the metrics behind it are kept aside.
    provenance: what cell.json says of where it comes from; default: this process, its command, hashes of its data.
    alone: whether this process does nothing else, so that its memory is the run's.
    keep_state: whether a finished run leaves a checkpoint of its last step beside its weights.
    A run that diverges ends with the state ``diverged``; bad input raises `ConfigError` before anything is written.
    """
    own = world is None
    world = world or World.start(config.parallel)
    try:
        run = RunFolder(folder)
        config = world.agree(lambda: in_steps(config))
        world.agree_with_main(lambda: _check(run, config, mode, at))
        done = world.from_main(run.status() if run.exists and mode != "restart" else {})
        longer = done.get("state") == "finished" and done.get("step", 0) < config.steps
        if done.get("state") in ("finished", "diverged") and not longer and at is None:
            world.agree_with_main(lambda: check_weights(run) if (run.path / WEIGHTS).is_file() else None)
            return _finished(run, done)
        with contextlib.ExitStack() as stack:
            there = world.from_main(run.path.is_dir())
            if there:  # who trains there already is found before data are opened, which may take its time
                world.agree_with_main(lambda: stack.enter_context(run.locked()))
            task = world.agree(lambda: _open_task(config, world))
            if not there:
                world.agree_with_main(lambda: stack.enter_context(run.locked()))
            facts = Facts(run.path, config, provenance, alone=alone)
            begun = config.train.init_from is None or (mode != "restart" and _has_checkpoint(run, world))
            starting = None if begun else world.agree(lambda: starting_weights(config, task))
            engine = Engine(
                config, task, world, starting
            )  # finds what does not fit model or world, before anything is written
            stack.callback(engine.close)
            changed = changes(run.config(), config) if world.is_main and run.exists and mode != "restart" else []
            world.agree_with_main(lambda: run.begin(config, mode))
            world.agree_with_main(lambda: facts.begin(anew=mode == "restart"))
            loop = Loop(engine, run, display or QuietDisplay(), changed, keep_state=keep_state)
            stack.callback(loop.close)
            result = loop.run(at)
            if world.is_main:
                with contextlib.suppress(OSError):  # a full disk; the run itself has ended well
                    facts.end(threads=torch.get_num_threads(), chance_loss=loop.monitor.chance_loss)
            return result
    finally:
        if own:
            world.close()


def _check(run: RunFolder, config: RunConfig, mode: Mode, at: int | None) -> None:
    run.check(config, "resume" if at is not None else mode, at)
    if at is not None:
        checkpoint_at(run, at)
    check_trackers(config.logging)


def _open_task(config: RunConfig, world: World) -> Task:
    task = find_task(config.task)(config)
    check_memory(config, task, world)
    return task


def _has_checkpoint(run: RunFolder, world: World) -> bool:
    """Whether there is a checkpoint to go on from; all processes call this."""
    folder = run.path / CHECKPOINTS
    return world.from_main(folder.is_dir()) and CheckpointStore(folder, 1, world).latest() is not None


def _finished(run: RunFolder, done: dict[str, Any]) -> Result:
    message = f"{done['state']} already, at step {done.get('step')}; --restart begins anew"
    return Result(done["state"], done.get("step", 0), done.get("loss"), message, run.path, done.get("evaluation") or {})


class Loop:
    """One process's part of a run."""

    def __init__(
        self,
        engine: Engine,
        run: RunFolder,
        display: Display,
        changed: Sequence[str] = (),
        *,
        keep_state: bool = True,
    ) -> None:
        self.keep_state = keep_state
        config, task, world = engine.config, engine.task, engine.world
        self.changed = changed
        """What is not as it was when the run was begun or last resumed."""
        self.config, self.task, self.world, self.engine, self.folder = config, task, world, engine, run
        self.recorder = world.agree(lambda: Recorder(config, task, run, world, display))
        chance_loss = world.agree(task.chance_loss)
        self.monitor = DivergenceMonitor(config.divergence, config.schedule.warmup, chance_loss, task.chance)
        self.store = CheckpointStore(run.path / CHECKPOINTS, config.checkpoint.keep, world, report=self._not_saved)
        self.held_out = task.held_out_sizes()
        self.problem: str | None = None
        self.step, self.seconds, self.started = 0, 0.0, 0.0
        self.begun: list[StepResult] = []
        """Steps that are not read yet; more than one only where the engine runs ahead of them."""
        self.loss: float | None = None
        self.evaluation: dict[str, float] = {}
        self.saved: int | None = None

    def close(self) -> None:
        """Let go of files and threads, however the run ended."""
        self.store.finish()
        self.recorder.close()

    # The run ---------------------------------------------------------------------------------------------

    def run(self, at: int | None = None) -> Result:
        """From where it stands, or from an older checkpoint, to the end, a divergence or a signal."""
        self.restore(at)
        self.world.agree(lambda: self.recorder.start(self.step, self.engine))
        self.world.agree(lambda: self._status("running"))
        for note in self.config.notes if self.step == 0 else ():
            self._note("recipe", note)
        for words in self.changed:
            self._note("changed", words)
        if self.engine.micro.count > 1:
            self._note("micro_batch", self.engine.micro.sentence())
        if self.config.train.parameters != "all":
            self._note("parameters", self.engine.trained.sentence(self.config.train.parameters))
        for sentence in self.task.notes():
            self._note("data", sentence)
        self._say_held_out()
        if self.engine.compiled and self.step < self.config.steps:
            self._note("compile", "blocks are compiled in the first step; that takes up to a minute, once")
        if self.engine.precision.tf32:
            self._note("tf32", "fp32 matrix products run in TF32; train.tf32=false has them in full precision")
        try:
            return self._steps()
        except OSError as error:
            self._fail(error)
            raise

    def _steps(self) -> Result:
        with Interruption() as interruption:
            while self.step < self.config.steps:
                verdict = self.take_step()
                if verdict is not None:
                    return self.end("diverged", verdict.message)
                if self._due(getattr(self.config.evaluation, "every", None)):
                    self.evaluate()
                asked = self.world.any(interruption.asked)
                if asked and (verdict := self.settle()) is not None:
                    return self.end("diverged", verdict.message)
                if asked and self.step < self.config.steps:
                    return self.end("interrupted", interruption=interruption)
                if any(every and self.step % every == 0 for every in self._saves):
                    self.save()
            return self.end("finished")

    def _say_held_out(self) -> None:
        """A word of warning where held-out numbers will mean little."""
        for of, size in self.held_out.items():
            if size < LEAST[of]:
                self._note(
                    "held_out", f"{size:,} {of} to measure on are too few to tell runs apart; it takes {LEAST[of]:,}"
                )

    def take_step(self) -> Verdict | None:
        """Compute the next step and take it, leave it out, or go back; a verdict that ends the run is returned.

        Where the engine runs ahead, the step is taken at once and judged with others, before anybody looks: a line on
        the screen, an evaluation, a checkpoint. What lies behind a bad one then counts for nothing.
        """
        if not self.begun:
            self.started = time.perf_counter()
        self.begun.append(self.engine.compute(self.step + 1))
        if self.engine.ahead:
            self.step += 1
            self.engine.apply(self.step)
            if not any(map(self._due, self._looks)):
                return None
        return self.settle()

    @property
    def _looks(self) -> tuple[int | None, ...]:
        """Every how many steps somebody looks at the run."""
        config = self.config
        return config.logging.every, *self._saves, getattr(config.evaluation, "every", None)

    @property
    def _saves(self) -> tuple[int | None, ...]:
        """Every how many steps there is a checkpoint."""
        return self.config.checkpoint.every, self.config.checkpoint.permanent

    def settle(self) -> Verdict | None:
        """Read and judge the steps that are not yet, oldest first; a verdict that ends the run is returned."""
        begun, self.begun = self.begun, []
        if begun:
            begun[-1].numbers  # noqa: B018  # waits for all of them
        for computed in begun:
            self.step = computed.step - 1
            verdict = self._settle(computed, len(begun))
            if verdict is not None or self.step != computed.step:  # it ends here, or went back
                return verdict
        return None

    def _settle(self, computed: StepResult, together: int) -> Verdict | None:
        step = computed.step
        verdict = self.monitor.judge(step, computed.loss, computed.grad_norm)
        overflow = not math.isfinite(computed.grad_norm) and math.isfinite(computed.loss)
        if overflow and self.engine.precision.lower_scale():  # fp16's own search for a scale, no divergence
            self._finish_step(computed, together, skipped="overflow")
            return None
        action = "go_on" if verdict is None else self._act(verdict, computed)
        if action == "stop":
            return verdict
        if action == "rollback":
            return self.roll_back(verdict, computed)
        if action == "go_on":
            if not self.engine.ahead:
                self.engine.apply(step)
            self.monitor.accept(computed.loss, verdict, computed.metrics.get(self.task.chance_of))
        skipped = verdict.kind if verdict is not None and action == "skip" else None
        self._finish_step(computed, together, skipped)
        return None

    def _act(self, verdict: Verdict, computed: StepResult) -> str:
        action, step = self.monitor.act(verdict), computed.step
        if verdict.kind == "spike" and action == "go_on":
            self._note("spike", f"step {step}: {verdict.message}", step)
            return action
        again = functools.partial(self.engine.compute_again, computed)
        layer = locate(self.engine.model, verdict, again, self.world, computed.largest)
        where = "" if layer is None else f" ({layer})"
        self._note(verdict.kind, f"step {step}: {verdict.message}{where}; policy: {action}", step)
        return action

    def _finish_step(self, computed: StepResult, together: int, skipped: str | None) -> None:
        step = self.step = computed.step
        self.loss = computed.loss
        seconds = (time.perf_counter() - self.started) / together
        self.seconds += seconds
        work = self.config.train.batch_size * self.engine.flops_per_sample
        self.recorder.step(step, computed, self.engine.lr(step), seconds, work, skipped)

    def _due(self, every: int | None) -> bool:
        return every is not None and (self.step % every == 0 or self.step == self.config.steps)

    def evaluate(self) -> None:
        """Measure on held-out data and record it."""
        self.evaluation = self.engine.evaluate(final=self.step == self.config.steps)
        self.recorder.evaluation(self.step, self.evaluation)

    # Checkpoints -----------------------------------------------------------------------------------------

    def save(self, wait: bool = False) -> bool:
        """Begin to write a checkpoint of this step; the metrics up to it are on the disk before. False if it failed."""
        self.recorder.sync()
        self.problem = None
        every = self.config.checkpoint.permanent
        permanent = every is not None and self.step % every == 0
        succeeded = self.store.save(self.step, self.engine.state(self._progress()), wait, permanent)
        self.saved = self.step
        self._status("running")
        return succeeded

    def _progress(self) -> dict[str, Any]:
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
            raise ConfigError(
                f"--at: {self.step} is not allowed now; its checkpoint could not be written as the newest"
            )
        kept = (
            ""
            if aside is None
            else f"; metrics of the steps behind it are kept in {aside.relative_to(self.folder.path)}"
        )
        return f"went back to step {self.step}{kept}"

    def _go_on_from(self, step: int, event: str, message: str) -> None:
        self.recorder.rewind(step)
        self._note(event, message, step)

    def roll_back(self, verdict: Verdict | None, computed: StepResult) -> Verdict | None:
        """Go back to the last checkpoint and on with the data behind the bad batch."""
        sample, rollbacks = computed.sample + self.config.train.batch_size, self.monitor.rollbacks
        failed = computed.step
        if self.store.latest() is None:
            self._note("rollback", f"step {failed}: there is no checkpoint to go back to", failed)
            return verdict
        self.restore()
        self.engine.loader.seek(sample)
        self.monitor.rollbacks = rollbacks
        self._note("rollback", f"from step {failed} to {self.step}, data goes on at sample {sample}", self.step)
        return None

    # The end ---------------------------------------------------------------------------------------------

    def end(self, state: State, message: str = "", *, interruption: Interruption | None = None) -> Result:
        """Save what there is to save and say how it ended."""
        succeeded, facts = True, {}
        if state == "diverged":
            message = f"diverged at step {self.step + 1}: {message}"
        elif self.saved != self.step and (self.keep_state or state != "finished"):
            succeeded = self.save(wait=True)
        succeeded = self.store.finish() and succeeded
        if state == "finished":
            facts = self.world.agree(self._export)  # which goes through all matrices, whatever becomes of the file
            message = f"finished {self.step} steps"
        received = None if interruption is None else interruption.signal or signal.SIGTERM
        if received is not None:
            message = f"{received.name}: saved at step {self.step}; the same command goes on from here"
            if not succeeded:
                message = f"{received.name}: step {self.step} was not saved; the same command goes on from before it"
        self._note(state, message, self.step)
        self._status(state, message=message, **facts)
        return Result(state, self.step, self.loss, message, self.folder.path, self.evaluation, received)

    def _fail(self, error: OSError) -> None:
        """Leave word of what the system refused, as far as it still lets us."""
        reason = f"{error.strerror or error}" + (f" ({error.filename})" if error.filename else "")
        with contextlib.suppress(OSError):
            self._status("failed", message=f"step {self.step}: {reason}; the same command goes on from the last save")

    def _export(self) -> dict[str, Any]:
        """Write the weights and what they need beside them; what status.json says of them."""
        written = self.engine.export(self.folder.path / WEIGHTS)
        if written is None:
            return {}
        self.task.save_extras(self.folder.path)
        return {"weights": asdict(written)}

    def _not_saved(self, sentence: str) -> None:
        """A save has failed, or a checkpoint was found damaged."""
        self.problem = sentence
        self._note("checkpoint", sentence)

    def _status(self, state: State, **facts: Any) -> None:
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

    def _note(self, kind: str, message: str, step: int | None = None) -> None:
        self.recorder.note(kind, self.step if step is None else step, message)
