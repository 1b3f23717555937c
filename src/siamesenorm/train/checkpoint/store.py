"""Checkpoints that are complete or absent.

::

    store = CheckpointStore(folder, keep=2, world=world)
    if (checkpoint := store.latest()) is not None:
        progress = store.load(checkpoint, state)
    ...
    store.save(step, state)        # copies the state, writes it in the background, publishes it when it is complete
    store.finish()                 # waits for the write under way

A checkpoint is written into a hidden folder, brought to the disk, given its manifest, and only then renamed to
``step-00001000``. Nothing is read from one whose manifest its files do not agree with.
"""

from __future__ import annotations

import json
import logging
import threading
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards

from siamesenorm.data.listing import names_in
from siamesenorm.data.reading import read_object
from siamesenorm.train.checkpoint.folder import PROGRESS, CheckpointFolder
from siamesenorm.train.checkpoint.manifest import CheckpointError, Manifest, ManifestEntry, check, record
from siamesenorm.train.checkpoint.shards import ShardReader, ShardWriter, read_sizes
from siamesenorm.train.checkpoint.state import Restoring, Staged, TrainingState, flatten
from siamesenorm.train.distributed import World

log = logging.getLogger("siamesenorm")


@dataclass(frozen=True)
class Checkpoint:
    """A complete checkpoint: every file was found to be what was written."""

    folder: Path
    manifest: Manifest

    @property
    def step(self) -> int:
        """Steps that had been done."""
        return self.manifest.step

    @property
    def progress(self) -> dict[str, Any]:
        """What the loop wrote beside its tensors."""
        return read_object(self.folder / PROGRESS, "checkpoint", strict=False)  # a loss may be no number


class CheckpointStore:
    """The checkpoints of one run, in a folder that all its processes see.

    keep: how many of the newest complete ones stay. report: is called, on the main process and with one sentence, for
    damaged checkpoints and saves that failed; default: a warning in the log.
    """

    def __init__(
        self, folder: Path | str, keep: int, world: World | None = None, report: Callable[[str], None] | None = None
    ) -> None:
        if keep < 1:
            raise CheckpointError.not_allowed("keep", keep, "1 or more")
        self.folder, self.world = Path(folder), world or World()
        self._places = CheckpointFolder(self.folder, keep)
        self._report = report or log.warning
        self._channel = self.world.new_group()  # the writing thread's own: training talks on the other at the time
        self._writing: threading.Thread | None = None
        self._failure: str | None = None

    # Saving --------------------------------------------------------------------------------------------

    def save(self, step: int, state: TrainingState, wait: bool = False, permanent: bool = False) -> bool:
        """Copy the state and begin to write it; every process must call this, at the same step.

        state: ``{"model": module, "optimizer": optimizer, "progress": JSON values, "tensors": name to tensor}``.
        Tensors must be the same on every process (or DTensors), or have names that no other process uses.
        wait: return when it is published. permanent: it is never removed. Returns False if the save before, or this
        one, has failed.
        """
        succeeded = self.finish()
        staged = Staged(flatten(state))
        progress = json.dumps(state.get("progress") or {}, indent=1)
        self._failure = None
        if wait:
            self._write(step, staged, progress, permanent)
            return self.finish() and succeeded
        self._writing = threading.Thread(
            target=self._write, args=(step, staged, progress, permanent), name="checkpoint", daemon=True
        )
        self._writing.start()
        return succeeded

    def finish(self) -> bool:
        """Wait for the write under way; False if it failed, which has then been reported."""
        if self._writing is not None:
            self._writing.join()
            self._writing = None
        if self._failure is None:
            return True
        if self.world.is_main:
            self._report(self._failure)
        self._failure = None
        return False

    def _write(self, step: int, staged: Staged, progress: str, permanent: bool) -> None:
        """Write, publish, remove old ones; runs in a thread, in step with the other processes' threads."""
        try:
            self._failure = self._write_together(step, staged, progress, permanent)
        except BaseException as error:  # a process died, or DCP failed in a way of its own
            self._failure = f"checkpoint of step {step} was not saved: {_reason(error)}"

    def _write_together(self, step: int, staged: Staged, progress: str, permanent: bool) -> str | None:
        begun = self._together(lambda: self._places.begin(step))
        problem: str | None = "it was not written"
        try:
            problem = begun if isinstance(begun, str) else self._write_into(*begun, step, staged, progress, permanent)
        finally:
            if problem is not None and self.world.is_main and not isinstance(begun, str):
                self._places.abandon(begun[0])
        if problem is None:
            return None
        return f"checkpoint of step {step} was not saved: {problem}; the ones before it are untouched"

    def _write_into(
        self, partial: Path, sequence: int, step: int, staged: Staged, progress: str, permanent: bool
    ) -> str | None:
        try:
            self._write_shards(partial, staged.arrived())
        except CheckpointException as error:  # raised on all processes when one of them fails
            return _reason(error)
        files, problem = self._record_shards(partial)
        if problem is not None:
            return problem
        published = self._together(
            lambda: self._places.publish(partial, step, sequence, self.world.size, files, progress, permanent)
        )
        return published if isinstance(published, str) else None

    def _together(self, action: Callable[[], tuple[Path, int]]) -> tuple[Path, int] | str:
        """Let the main process act; its result, or the reason why there is none, on all."""
        result: tuple[Path, int] | str = ""
        if self.world.is_main:
            try:
                result = action()
            except Exception as error:
                result = _reason(error)
        return self.world.from_main(result, self._channel)

    def _write_shards(self, partial: Path, tensors: dict[str, Tensor]) -> None:
        _quiet()
        planner = DefaultSavePlanner(flatten_state_dict=False)
        alone = self.world.size == 1
        save_shards(
            tensors, storage_writer=ShardWriter(partial), planner=planner, process_group=self._channel, no_dist=alone
        )

    def _record_shards(self, partial: Path) -> tuple[dict[str, ManifestEntry], str | None]:
        """Sizes and SHA-256 of all shards, each read by the process that wrote it."""
        mine: dict[str, ManifestEntry] | str
        try:
            mine = record(partial, (name for name in names_in(partial) if name.startswith(f"__{self.world.rank}_")))
        except OSError as error:
            mine = _reason(error)
        files: dict[str, ManifestEntry] = {}
        for part in self.world.gather(mine, self._channel):
            if isinstance(part, str):
                return {}, part
            files |= part
        return files, None

    # Finding and loading -------------------------------------------------------------------------------

    def latest(self, step: int | None = None) -> Checkpoint | None:
        """The newest complete checkpoint; damaged ones are reported and passed over. All processes call this.

        step: the newest of this step.
        """
        self.finish()
        candidates, problems = self.world.from_main(self._places.candidates() if self.world.is_main else ([], []))
        for folder, manifest in candidates:
            if step is not None and manifest.step != step:
                continue
            mine = dict(list(manifest.files.items())[self.world.rank :: self.world.size])
            damage = next(filter(None, self.world.gather(check(folder, mine))), None)
            if damage is None:
                self._tell(problems, "the newest complete one is taken")
                self._places.found_good(folder)
                return Checkpoint(folder, manifest)
            problems.append(damage)
        self._tell(problems, "no complete checkpoint is left")
        return None

    def load(self, checkpoint: Checkpoint, state: TrainingState) -> dict[str, Any]:
        """Fill the state from a checkpoint, in place, and return its progress. All processes call this.

        It may have been written by another number of processes or under another sharding. Tensors of
        ``state["tensors"]`` that the checkpoint has not stay as they are; parameters must all be there.
        """
        _quiet()
        restoring = Restoring(state, read_sizes(checkpoint.folder))
        planner = DefaultLoadPlanner(flatten_state_dict=False)
        alone = self.world.size == 1
        try:
            load_shards(
                restoring.places,
                storage_reader=ShardReader(checkpoint.folder),
                planner=planner,
                process_group=self._channel,
                no_dist=alone,
            )
        except CheckpointException as error:  # raised on all processes when one of them fails
            raise CheckpointError(f"{checkpoint.folder} cannot be read: {_reason(error)}") from None
        restoring.done()
        progress = checkpoint.progress
        if isinstance(state.get("progress"), dict):
            state["progress"].clear()
            state["progress"].update(progress)
        return progress

    def _tell(self, problems: list[str], consequence: str) -> None:
        if self.world.is_main:
            for problem in problems:
                self._report(f"damaged checkpoint: {problem}; {consequence}")


def _reason(error: BaseException) -> str:
    """Why a save failed, in a few words: the system's own where there are any."""
    if isinstance(error, CheckpointException):
        rank, (error, _) = min(error.failures.items())
        return f"process {rank}: {_reason(error)}" if len(error.args) else _reason(error)
    seen: BaseException | None = error
    while seen is not None:
        if isinstance(seen, OSError) and seen.strerror:
            return seen.strerror.lower() + (f" ({seen.filename})" if seen.filename else "")
        seen = seen.__cause__ or seen.__context__
    text = (str(error).strip().splitlines() or [type(error).__name__])[0]
    return "another process was lost" if "gloo" in text else text


def _quiet() -> None:
    """A world of one process is what was meant; DCP would say so at every save."""
    warnings.filterwarnings("ignore", message="torch.distributed is disabled")
