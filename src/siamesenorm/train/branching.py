"""Several decays from one trunk: a run that begins with the checkpoint of another and lets the learning rate fall.

branch("runs/trunk", at=8000, decay=2000, out="runs/8000+2000")     # then: siamesenorm train runs/8000+2000

The new run is the one that ``schedule.kind=wsd`` with these numbers would have been from the first step on, bit by
bit: up to the decay both have the same learning rate. So many token budgets come from one long run.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path

from siamesenorm.data.atomic import sync_folder, write_json, write_whole
from siamesenorm.data.removal import scratch_folder
from siamesenorm.data.replacement import rename_free
from siamesenorm.errors import ConfigError
from siamesenorm.train.checkpoint.folder import RUN, CheckpointFolder
from siamesenorm.train.checkpoint.manifest import MANIFEST, CheckpointError, Manifest, check
from siamesenorm.train.config import RunConfig
from siamesenorm.train.facts import read_facts
from siamesenorm.train.folder import CHECKPOINTS, CONFIG, FACTS, METRICS, RunFolder, check_outside, read_lines
from siamesenorm.train.recipes import parse_config
from siamesenorm.train.schedule import decay_steps
from siamesenorm.train.yaml import write_yaml


def branch(run: Path | str, at: int, decay: int | None = None, out: Path | str | None = None) -> Path:
    """A new run folder that goes on from a checkpoint of another run and decays for `decay` steps.

    at: a step that the run has a checkpoint of, with its learning rate at the peak. decay: by default so many that
    they are the share of all steps which the run's ``schedule.decay`` says. out: by default beside the run.
    Whatever is wrong raises before anything is written.
    """
    trunk = RunFolder(run)
    config = trunk.config()
    folder, manifest = checkpoint_at(trunk, at)
    _check_peak(config, at)
    steps = _default_decay(config, at) if decay is None else decay
    if steps < 1:
        raise ConfigError.not_allowed("--decay", steps, "steps, 1 or more")
    branched = decaying(config, at, steps)
    place = Path(out) if out is not None else trunk.path.resolve().parent / f"{trunk.path.resolve().name}-{at}+{steps}"
    message = f"branched from {trunk} at step {at}, to decay for {steps} steps"
    new_run("--out", place, trunk, at, branched, "branched", message, lambda to: _copy_checkpoint(folder, manifest, to))
    return place


def new_run(
    field: str,
    place: Path,
    trunk: RunFolder,
    at: int,
    config: RunConfig,
    event: str,
    message: str,
    checkpoint: Callable[[Path], None],
    beside: Mapping[str, str] | None = None,
) -> None:
    """A folder of a run that goes on where another stood at a step; `checkpoint` fills the folder of its checkpoints.

    field: what an error begins with. beside: other files by name, with their text. All of it is there or nothing.
    """
    if os.path.lexists(place):
        raise ConfigError(f"{field}: {str(place)!r} is there already; it takes a new folder")
    check_outside(field, place)
    try:
        place.parent.mkdir(parents=True, exist_ok=True)
        with scratch_folder(place.parent, place.name) as scratch:
            checkpoint(scratch / CHECKPOINTS)
            lines = read_lines(trunk.path / METRICS)
            write_whole(scratch / METRICS, "".join(line for line, record in lines if record["step"] <= at))
            facts = read_facts(trunk.path)  # it goes on with no other data, and began as its trunk did
            known = {"data": {}} | {name: facts[name] for name in ("data", "init_from_sha256") if name in facts}
            texts = {**(beside or {}), CONFIG: write_yaml(config.as_dict()), FACTS: json.dumps(known, indent=1) + "\n"}
            for name, text in texts.items():
                write_whole(scratch / name, text)
            RunFolder(scratch).event(event, at, message)
            RunFolder(scratch).write_status("interrupted", step=at, steps=config.steps, message=message)
            sync_folder(scratch)
            rename_free(scratch, place)
    except OSError as error:
        raise ConfigError.failed(field, place, "written", error) from None


def decaying(config: RunConfig, at: int, decay: int) -> RunConfig:
    """The run that is the same up to a step and decays from there on."""
    values = config.as_dict()
    values["train"] |= {"steps": at + decay, "tokens": None, "epochs": None}
    values["schedule"] |= {"kind": "wsd", "decay": decay / (at + decay)}
    return parse_config(values)


def _default_decay(config: RunConfig, at: int) -> int:
    share = config.schedule.decay
    if share >= 1:
        raise ConfigError(f"--decay: is not given, and schedule.decay = {share:g} leaves no step before it")
    return max(1, round(at * share / (1 - share)))


def checkpoint_at(trunk: RunFolder, at: int | None) -> tuple[Path, Manifest]:
    """The newest sound checkpoint, or the newest of a step."""
    folder = trunk.path / CHECKPOINTS
    found, _ = CheckpointFolder(folder, keep=1).candidates() if folder.is_dir() else ([], [])
    damage = ""
    for path, manifest in found:
        if at is None or manifest.step == at:
            problem = check(path, manifest.files)
            if problem is None:
                return path, manifest
            damage = f" ({problem})"
    if at is None:
        raise ConfigError(f"run: {str(trunk)!r} has no sound checkpoint{damage}")
    steps = sorted({manifest.step for _, manifest in found if manifest.step != at})
    there = f"it takes one of {', '.join(map(str, steps))}" if steps else "it has no others"
    raise ConfigError.refused("--at", at, f"{str(trunk)!r} has no sound checkpoint of that step{damage}; {there}")


def _check_peak(config: RunConfig, at: int) -> None:
    """Raise where the run's learning rate has not stayed at its peak since the warm-up."""
    schedule, last = config.schedule, config.steps
    if schedule.kind == "cosine":
        raise ConfigError("run: schedule.kind = 'cosine' has no steady part to branch from; it takes wsd or constant")
    if schedule.kind == "wsd":
        last -= decay_steps(schedule, config.steps)
    if not schedule.warmup <= at <= last:
        raise ConfigError.refused(
            "--at", at, f"the run's learning rate is not at its peak there; it takes {schedule.warmup} to {last}"
        )


def _copy_checkpoint(folder: Path, manifest: Manifest, target: Path) -> None:
    """A checkpoint as the only one of a new folder, compared with its checksums behind the copy."""
    copy = target / folder.name
    copy.mkdir(parents=True)
    for name in (*manifest.files, MANIFEST):
        shutil.copyfile(folder / name, copy / name)
    problem = check(copy, manifest.files)
    if problem is not None:
        raise CheckpointError(f"run: {problem}; it was removed or changed while it was copied")
    write_json(target / RUN, {"run": manifest.run})
