"""A whole run: `train` begins or resumes it, `Loop` takes its steps, and `RunProgress` keeps account of them.

result = train(resolve("lm-tiny", ["steps=100"]), "runs/first")
result.state, result.loss, result.evaluation["perplexity"]
"""

from __future__ import annotations

import contextlib
import functools
import math
import signal
import time
from pathlib import Path
from typing import Any

import torch

from siamesenorm.tasks import Task, find_task
from siamesenorm.train.branching import checkpoint_at
from siamesenorm.train.checkpoint.store import CheckpointStore
from siamesenorm.train.config import RunConfig
from siamesenorm.train.display import Display
from siamesenorm.train.distributed import World
from siamesenorm.train.divergence import Verdict, locate
from siamesenorm.train.engine import Engine, StepResult
from siamesenorm.train.facts import Facts
from siamesenorm.train.folder import CHECKPOINTS, WEIGHTS, Mode, RunFolder
from siamesenorm.train.init_from import starting_weights
from siamesenorm.train.interruption import Interruption
from siamesenorm.train.memory import check_memory
from siamesenorm.train.progress import Result, RunProgress
from siamesenorm.train.recipes import in_steps
from siamesenorm.train.resuming import changes
from siamesenorm.train.trackers import check_trackers
from siamesenorm.train.weights import check_weights


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
        ended = _ended_before(run, config, mode, world) if at is None else None
        if ended is not None:
            return ended
        with contextlib.ExitStack() as stack:
            there = world.from_main(run.path.is_dir())
            if there:  # who trains there already is found before data are opened, which may take its time
                world.agree_with_main(lambda: stack.enter_context(run.locked()))
            task = world.agree(lambda: _open_task(config, world))
            if not there:
                world.agree_with_main(lambda: stack.enter_context(run.locked()))
            facts = Facts(run.path, config, provenance, alone=alone)
            if mode != "restart":
                world.agree_with_main(facts.check)
            begun = config.train.init_from is None or (mode != "restart" and _has_checkpoint(run, world))
            starting = None if begun else world.agree(lambda: starting_weights(config, task))
            # finds what does not fit model or world, before anything is written
            engine = Engine(config, task, world, starting)
            stack.callback(engine.close)
            changed = changes(run.config(), config) if world.is_main and run.exists and mode != "restart" else []
            world.agree_with_main(lambda: run.begin(config, mode))
            start = starting.sha256 if starting is not None and world.is_main else None
            world.agree_with_main(lambda: facts.begin(anew=mode == "restart", start=start))
            remarks = () if starting is None else starting.remarks
            progress = RunProgress(engine, run, display or Display(), changed, remarks=remarks, keep_state=keep_state)
            stack.callback(progress.close)
            progress.begin(at)
            result = Loop(progress).run()
            if world.is_main:
                with contextlib.suppress(OSError):  # a full disk; the run itself has ended well
                    facts.end(threads=torch.get_num_threads(), chance_loss=progress.monitor.chance_loss)
            return result
    finally:
        if own:
            world.close()


def _check(run: RunFolder, config: RunConfig, mode: Mode, at: int | None) -> None:
    run.check(config, "resume" if at is not None else mode, at)
    if at is not None:
        checkpoint_at(run, at)
    check_trackers(config.logging)


def _ended_before(run: RunFolder, config: RunConfig, mode: Mode, world: World) -> Result | None:
    """The result of a run that is over already and is not asked for more steps."""
    done = world.from_main(run.status() if run.exists and mode != "restart" else {})
    state, step = done.get("state"), done.get("step", 0)
    if state not in ("finished", "diverged") or (state == "finished" and step < config.steps):
        return None
    world.agree_with_main(lambda: check_weights(run) if (run.path / WEIGHTS).is_file() else None)
    message = f"{state} already, at step {done.get('step')}; --restart begins anew"
    return Result(state, step, done.get("loss"), message, run.path, done.get("evaluation") or {})


def _open_task(config: RunConfig, world: World) -> Task:
    task = find_task(config.task)(config)
    check_memory(config, task, world)
    return task


def _has_checkpoint(run: RunFolder, world: World) -> bool:
    """Whether there is a checkpoint to go on from; all processes call this."""
    folder = run.path / CHECKPOINTS
    return world.from_main(folder.is_dir()) and CheckpointStore(folder, 1, world).latest() is not None


class Loop:
    """One process's steps of a run, with evaluations, checkpoints, divergence and signals between them."""

    def __init__(self, progress: RunProgress) -> None:
        self.progress, self.engine, self.monitor = progress, progress.engine, progress.monitor
        self.config, self.recorder = progress.config, progress.recorder
        self.begun: list[StepResult] = []
        """Steps that are not read yet; more than one only where the engine runs ahead of them."""
        self.started = 0.0
        checkpoint = self.config.checkpoint
        self.evaluates: int | None = getattr(self.config.evaluation, "every", None)
        self.saves = checkpoint.every, checkpoint.permanent
        self.looks = self.config.logging.every, self.evaluates, *self.saves
        """Every how many steps the numbers of a run are read."""

    @property
    def step(self) -> int:
        """The last step that was taken."""
        return self.progress.step

    def run(self) -> Result:
        """From where it stands to the end, a divergence or a signal."""
        try:
            with Interruption() as interruption:
                return self._steps(interruption)
        except OSError as error:
            self.progress.fail(error)
            raise

    def _steps(self, interruption: Interruption) -> Result:
        progress = self.progress
        while self.step < self.config.steps:
            verdict = self.take_step()
            if verdict is not None:
                return progress.end("diverged", verdict.message)
            if self._due(self.evaluates):
                self.evaluate()
            asked = progress.world.any(interruption.asked)
            if asked and (verdict := self.settle()) is not None:
                return progress.end("diverged", verdict.message)
            if asked and self.step < self.config.steps:
                return progress.end("interrupted", received=interruption.signal or signal.SIGTERM)
            if any(every and self.step % every == 0 for every in self.saves):
                progress.save()
        return progress.end("finished")

    def take_step(self) -> Verdict | None:
        """Compute the next step and take it, leave it out, or go back; a verdict that ends the run is returned.

        Where the engine runs ahead, the step is taken at once and judged with others, before their numbers are needed:
        for a line on the screen, an evaluation, a checkpoint. What lies behind a bad one then counts for nothing.
        """
        if not self.begun:
            self.started = time.perf_counter()
        self.begun.append(self.engine.compute(self.step + 1))
        if self.engine.ahead:
            self.progress.step += 1
            self.engine.apply(self.step)
            if not any(map(self._due, self.looks)):
                return None
        return self.settle()

    def settle(self) -> Verdict | None:
        """Read and judge the steps that are not yet, oldest first; a verdict that ends the run is returned."""
        begun, self.begun = self.begun, []
        if begun:
            begun[-1].numbers  # noqa: B018  # waits for all of them
        for computed in begun:
            self.progress.step = computed.step - 1
            verdict = self._settle(computed, len(begun))
            if verdict is not None or self.step != computed.step:  # it ends here, or went back
                return verdict
        return None

    def _settle(self, computed: StepResult, together: int) -> Verdict | None:
        verdict = self.monitor.judge(computed.step, computed.loss, computed.grad_norm)
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
                self.engine.apply(computed.step)
            self.monitor.accept(computed.loss, verdict, computed.metrics.get(self.engine.task.chance_of))
        skipped = verdict.kind if verdict is not None and action == "skip" else None
        self._finish_step(computed, together, skipped)
        return None

    def _act(self, verdict: Verdict, computed: StepResult) -> str:
        """What the policy does about a verdict, said with the layer where it began."""
        action, step = self.monitor.act(verdict), computed.step
        if verdict.kind == "spike" and action == "go_on":
            self.progress.note("spike", f"step {step}: {verdict.message}", step)
            return action
        again = functools.partial(self.engine.compute_again, computed)
        layer = locate(self.engine.model, verdict, again, self.engine.world, computed.largest)
        where = "" if layer is None else f" ({layer})"
        self.progress.note(verdict.kind, f"step {step}: {verdict.message}{where}; policy: {action}", step)
        return action

    def roll_back(self, verdict: Verdict | None, computed: StepResult) -> Verdict | None:
        """Go back to the last checkpoint and on with the data behind the bad batch."""
        progress, failed, rollbacks = self.progress, computed.step, self.monitor.rollbacks
        if progress.store.latest() is None:
            progress.note("rollback", f"step {failed}: there is no checkpoint to go back to", failed)
            return verdict
        sample = computed.sample + self.config.train.batch_size
        progress.restore()
        self.engine.loader.seek(sample)
        self.monitor.rollbacks = rollbacks
        progress.note("rollback", f"from step {failed} to {self.step}, data goes on at sample {sample}")
        return None

    def _finish_step(self, computed: StepResult, together: int, skipped: str | None) -> None:
        progress, step = self.progress, computed.step
        seconds = (time.perf_counter() - self.started) / together
        progress.step, progress.loss = step, computed.loss
        progress.seconds += seconds
        work = self.config.train.batch_size * self.engine.flops_per_sample
        self.recorder.step(step, computed, self.engine.lr(step), seconds, work, skipped)

    def _due(self, every: int | None) -> bool:
        return every is not None and (self.step % every == 0 or self.step == self.config.steps)

    def evaluate(self) -> None:
        """Measure on held-out data and record it."""
        self.progress.evaluation = self.engine.evaluate(final=self.step == self.config.steps)
        self.recorder.evaluation(self.step, self.progress.evaluation)
