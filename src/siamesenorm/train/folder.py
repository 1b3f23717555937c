"""The folder of a run::

config.yaml            the resolved configuration; `siamesenorm train` takes it as a recipe
status.json            running, finished, diverged, interrupted or failed; step, loss, last evaluation
metrics.jsonl          a line for every step and one for every evaluation
cell.json              cost, command, versions, machine, hashes of the data
events.jsonl           what happened: started, resumed, spikes, rollbacks, damaged checkpoints
checkpoints/           training state
aside/                 metrics of steps that a return to an older checkpoint (``--at``) has left behind
graft.json             the certificate of a run that began as another one in another topology
weights.safetensors    at the end, beside tokenizer.json, or images.json, evaluation.json and confusion.csv
"""

from __future__ import annotations

import contextlib
import errno
import json
import math
import os
import re
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from siamesenorm.data.atomic import locked, sync_folder, write_json, write_whole
from siamesenorm.data.index import Count as Count
from siamesenorm.data.listing import names_in
from siamesenorm.data.reading import parse_json, read_model
from siamesenorm.data.removal import NotOurs, hidden_names, remove_entries, remove_tree
from siamesenorm.data.replacement import Replacement
from siamesenorm.errors import ConfigError, DataError, shown
from siamesenorm.train.checkpoint import folder as checkpoint_folder
from siamesenorm.train.config import RunConfig
from siamesenorm.train.recipes import load_recipe, parse_config
from siamesenorm.train.resuming import refused_change
from siamesenorm.train.yaml import write_yaml

CONFIG, STATUS, METRICS, EVENTS = "config.yaml", "status.json", "metrics.jsonl", "events.jsonl"
FACTS = "cell.json"
LEFT_METRICS = r"metrics-\d+-\d+(?:-\d+)?\.jsonl"
CHECKPOINTS, WEIGHTS, TENSORBOARD = "checkpoints", "weights.safetensors", "tensorboard"
GRAFT = "graft.json"
WANDB = "wandb.json"
EXTRAS = (
    WANDB,
    "tokenizer.json",
    "tokenizer_config.json",
    "images.json",
    "evaluation.json",
    "confusion.csv",
    GRAFT,
)
FILES = (STATUS, METRICS, EVENTS, FACTS, WEIGHTS, *EXTRAS)
ASIDE = "aside"
FOLDERS = {
    CHECKPOINTS: checkpoint_folder.MADE,
    TENSORBOARD: re.compile(r"events\.out\.tfevents\..+"),
    ASIDE: re.compile(rf"{LEFT_METRICS}|{hidden_names(LEFT_METRICS)}"),
}
OWN = (*FILES, *FOLDERS)
"""What --restart removes; the configuration is written over."""
LOCK = ".lock"
LEFT = re.compile(hidden_names("|".join(map(re.escape, (CONFIG, *FILES)))))
"""Files that killed writers leave behind."""
SECTIONS = {"task", "model", "data", "train", "optimizer", "schedule", "checkpoint", "logging", "parallel"}
"""All of these are in a run's configuration, and not in one written for something else."""

State = Literal["running", "finished", "diverged", "interrupted", "failed"]
Mode = Literal["auto", "resume", "restart"]
Figures = dict[str, float | None]


class AsWritten(BaseModel):
    """A file of a run: it may say more than is read of it, and what is read is as it was written."""

    model_config = ConfigDict(extra="allow", strict=True, allow_inf_nan=False)


def read_written(path: Path, kind: type[AsWritten]) -> dict[str, Any] | None:
    """What a file of a run says; None if it is not there or not sound."""
    try:
        return read_model(path, kind, "run").model_dump(exclude_unset=True)
    except DataError:
        return None


class Status(AsWritten):
    """What is read of status.json."""

    state: str = ""
    step: Count = 0
    loss: float | None = None
    evaluation: Figures = Field(default_factory=dict)
    message: str = ""


class Line(AsWritten):
    """What is read of a line of metrics.jsonl."""

    step: Count
    loss: float | None = None
    seconds: float | None = None
    evaluation: Figures = Field(default_factory=dict)


class RunFolder:
    """The files of one run; one process writes them."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    def __str__(self) -> str:
        return str(self.path)

    @property
    def exists(self) -> bool:
        """Whether a run has begun here."""
        return (self.path / CONFIG).is_file()

    def config(self) -> RunConfig:
        """The configuration that the run was begun or last resumed with."""
        if not self.exists:
            raise ConfigError(f"run: {str(self.path)!r} is not a run; it has no {CONFIG}")
        return parse_config(load_recipe(self.path / CONFIG))

    def status(self) -> dict[str, Any]:
        """What status.json says, nothing if it is not there or not sound."""
        return self.readable_status() or {}

    def readable_status(self) -> dict[str, Any] | None:
        """What status.json says; None if it is not there or not sound."""
        return read_written(self.path / STATUS, Status)

    def check(self, config: RunConfig, mode: Mode, at: int | None = None) -> None:
        """Raise if this configuration cannot be run here in this mode; writes nothing.

        at: the step that the run is to go on from; by default that of its newest checkpoint.
        """
        try:
            is_file = self.path.exists() and not self.path.is_dir()
            empty = not self.path.is_dir() or not any(name != LOCK for name in os.listdir(self.path))
        except (OSError, ValueError) as error:
            reason = getattr(error, "strerror", None) or str(error)
            raise ConfigError(f"run: {shown(str(self.path))} cannot be used: {reason}") from None
        if is_file:
            raise ConfigError(f"run: {str(self.path)!r} is a file; it takes a folder")
        if not self.exists:
            if mode == "resume":
                raise ConfigError(f"run: {str(self.path)!r} holds no run to resume; leave --resume out to begin one")
            if not empty:
                raise ConfigError(f"run: {str(self.path)!r} holds other files; it takes a new or empty folder or a run")
            check_outside("run", self.path)
            return
        self._check_names()
        if mode == "restart":
            return
        done = self.done() if at is None else at
        status = self.status()
        if at is None and status.get("state") == "finished":
            end = int(status.get("step") or 0)
            if done < end < config.steps:
                raise ConfigError.refused(
                    "train.steps",
                    config.steps,
                    "give another --run, or --restart to begin anew",
                    f"for {str(self.path)!r}, which finished at step {end} and has no checkpoint of it to go on from",
                )
            done = max(done, end)
        problem = refused_change(self.config(), config, done)
        if problem is not None:
            raise ConfigError(
                f"run: {str(self.path)!r} holds another run, whose {problem}; "
                f"give another --run, or --restart to begin anew"
            )

    @property
    def has_weights(self) -> bool:
        """Whether it has exported weights that are its newest: a run that goes on behind its end outgrows them."""
        gone_on = self.status().get("state") in ("running", "interrupted", "diverged", "failed")
        return (self.path / WEIGHTS).is_file() and not gone_on

    def done(self) -> int:
        """Steps that need not be done again: those of the newest checkpoint."""
        folder = self.path / CHECKPOINTS
        found, _ = checkpoint_folder.CheckpointFolder(folder, keep=1).candidates() if folder.is_dir() else ([], [])
        return found[0][1].step if found else 0

    def _check_names(self) -> None:
        """Raise if something else has the name of the run's own files and folders, or its configuration is none."""
        for name in (CONFIG, *FILES, *FOLDERS):
            path, wanted = self.path / name, "folder" if name in FOLDERS else "file"
            if os.path.lexists(path) and not (path.is_dir() if name in FOLDERS else path.is_file()):
                raise ConfigError.refused("run", path, f"a run has a {wanted} of that name")
        if SECTIONS - load_recipe(self.path / CONFIG).keys():
            raise ConfigError(f"run: {str(self.path)!r} holds other files; its {CONFIG} is not that of a run")

    def begin(self, config: RunConfig, mode: Mode) -> None:
        """Make the folder, or clear it for a restart, and write the configuration; all of it or nothing."""
        self.path.mkdir(parents=True, exist_ok=True)
        self._clear_left()
        text = write_yaml(config.as_dict()).encode()
        try:
            with Replacement() as swap:
                if mode == "restart":
                    self._set_aside(swap)
                if not self.exists or (self.path / CONFIG).read_bytes() != text:
                    swap.write(self.path / CONFIG, text)
        except NotOurs as error:
            raise ConfigError(f"run: {error}") from None
        sync_folder(self.path)

    def _clear_left(self) -> None:
        """Remove what killed writers have left behind."""
        remove_entries(self.path, LEFT)
        for name, own in FOLDERS.items():
            for left in filter(re.compile(hidden_names(name)).fullmatch, names_in(self.path)):
                with contextlib.suppress(OSError):
                    remove_tree(self.path / left, own)

    def _set_aside(self, swap: Replacement) -> None:
        """Take all that the run has written out of its place; a folder that is a link elsewhere is emptied."""
        for name in FILES:
            swap.set_aside(self.path / name)
        for name, own in FOLDERS.items():
            folder = self.path / name
            if not folder.is_symlink():
                swap.set_aside(folder, own)
                continue
            for inner in names_in(folder):
                if not own.fullmatch(inner):
                    raise NotOurs(f"{str(folder / inner)!r} was not made by this program; move it away")
                swap.set_aside(folder / inner, checkpoint_folder.CHECKPOINT)

    def write_status(self, state: State, **facts: Any) -> None:
        """Replace status.json."""
        value = {"state": state, **plain_numbers(facts), "time": _now()}
        try:
            write_json(self.path / STATUS, value)
        except OSError as error:
            if error.errno not in (errno.ENOSPC, errno.EDQUOT):
                raise
            self._write_over(STATUS, json.dumps(value, ensure_ascii=False).encode())

    def _write_over(self, name: str, content: bytes) -> None:
        """Write where a small file lies already, which a full disk allows."""
        with open(self.path / name, "r+b") as file:
            if len(content) > os.fstat(file.fileno()).st_blocks * 512:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path / name))
            file.write(content)
            file.truncate()

    def event(self, kind: str, step: int, message: str = "") -> None:
        """Add a line to events.jsonl."""
        line = json.dumps({"time": _now(), "step": step, "event": kind, "message": message}, ensure_ascii=False)
        with open(self.path / EVENTS, "a", encoding="utf-8") as file:
            file.write(line + "\n")

    def keep_aside(self, step: int) -> Path | None:
        """Copy the metrics behind a step to where they stay; None where there are none."""
        behind = [(line, record["step"]) for line, record in read_lines(self.path / METRICS) if record["step"] > step]
        if not behind:
            return None
        folder = self.path / ASIDE
        folder.mkdir(exist_ok=True)
        name, again = f"metrics-{behind[0][1]}-{behind[-1][1]}", 2
        place = folder / f"{name}.jsonl"
        while place.exists():
            place, again = folder / f"{name}-{again}.jsonl", again + 1
        write_whole(place, "".join(line for line, _ in behind))
        return place

    @contextlib.contextmanager
    def locked(self) -> Iterator[None]:
        """Keep a second process out of the run; the lock goes with the process, however it ends.

        A folder that was made for the lock alone goes with it.
        """
        fresh = not self.path.exists()
        self.path.mkdir(parents=True, exist_ok=True)
        refusal = ConfigError(f"run: another process is training in {str(self.path)!r}; wait or stop it")
        with locked(self.path / LOCK, os.O_RDWR | os.O_CREAT, refusal):
            try:
                yield
            finally:
                if fresh:
                    with contextlib.suppress(OSError):  # a run has begun in it
                        remove_tree(self.path, re.compile(re.escape(LOCK)))


def check_outside(field: str, place: Path) -> None:
    """Raise where a new folder would lie inside of a run: nobody looks for runs there, and a run stays as it is."""
    for folder in filter(_holds_run, place.resolve().parents):
        raise ConfigError.refused(field, place, f"it lies in the run {str(folder)!r}, which stays as it is")


def _holds_run(folder: Path) -> bool:
    if not (os.path.isfile(folder / CONFIG) and os.path.isfile(folder / STATUS)):
        return False  # a recipe of the user's own may lie around runs, whatever its name
    try:
        return not SECTIONS - load_recipe(folder / CONFIG).keys()
    except ConfigError:
        return False


class MetricsFile:
    """metrics.jsonl: every step once, in order, also after interruptions."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._file = None if not path.exists() else open(path, "a", encoding="utf-8")  # noqa: SIM115

    def rewind(self, step: int) -> None:
        """Drop what was written after a step, and a line that was cut off."""
        self.close()
        kept = [line for line, record in read_lines(self.path) if record["step"] <= step]
        write_whole(self.path, "".join(kept))
        self._file = open(self.path, "a", encoding="utf-8")  # noqa: SIM115

    def write(self, record: dict[str, Any]) -> None:
        """Add a line, and hand it to the system at once."""
        assert self._file is not None, "rewind comes first"
        self._file.write(json.dumps(plain_numbers(record), separators=(",", ":")) + "\n")
        self._file.flush()

    def sync(self) -> None:
        """Bring everything to the disk, before a checkpoint says that it is there."""
        if self._file is not None:
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """No more lines."""
        if self._file is not None:
            self._file.close()
            self._file = None


def read_lines(path: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Whole lines of a metrics file with what they hold."""
    if not path.exists():
        return
    with open(path, encoding="utf-8", errors="replace") as file:
        for line in file:
            with contextlib.suppress(ValueError, TypeError, KeyError):
                record = parse_json(line, strict=False)
                if line.endswith("\n") and isinstance(record["step"], int):
                    yield line, record


def read_metrics(path: Path | str) -> list[dict[str, Any]]:
    """The records of a run folder's metrics.jsonl; lines that are not sound are left out."""
    found: list[dict[str, Any]] = []
    for _, record in read_lines(Path(path) / METRICS):
        with contextlib.suppress(ValueError):
            Line.model_validate(record)
            found.append(record)
    return found


def plain_numbers(value: Any) -> Any:
    """The same with null for what JSON has no number for."""
    if isinstance(value, dict):
        return {name: plain_numbers(part) for name, part in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_numbers(part) for part in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _now() -> str:
    return time.strftime("%Y-%m-%dT%H:%M:%S%z")
