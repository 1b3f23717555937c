"""cell.json: what a run cost, and what someone needs to make it again; of a run alone as of a cell of a grid."""

from __future__ import annotations

import functools
import logging
import os
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import Field

from siamesenorm.data.atomic import write_json
from siamesenorm.errors import ConfigError
from siamesenorm.tasks import find_task
from siamesenorm.train.config import RunConfig
from siamesenorm.train.folder import FACTS, AsWritten, read_written
from siamesenorm.train.provenance import data_hashes, origin

log = logging.getLogger("siamesenorm")


class Machine(AsWritten):
    """Where a run was trained."""

    processor: str
    cores: int
    system: str


class GraftFacts(AsWritten):
    """The trained model that a comparison went on from; see `siamesenorm.lab.compare.grafts`."""

    source: str
    topology: str
    weights: str
    starts: dict[str, str]
    certificates: dict[str, dict[str, Any]]
    before: list[dict[str, Any]]


class FactsFile(AsWritten):
    """What is read of cell.json."""

    command: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    machine: Machine = Machine(processor="", cores=0, system="")
    data: dict[str, str] = Field(default_factory=dict)
    processor_seconds: float = 0
    memory_bytes: float = 0
    chance_loss: float | None = None
    graft: GraftFacts | None = None
    init_from_sha256: str | None = None
    """Of the weights that the run began with, where `train.init_from` names some."""


def read_facts(folder: Path) -> dict[str, Any]:
    """What cell.json says, nothing if it is not there or not sound."""
    return read_written(folder / FACTS, FactsFile) or {}


def changed_data(folder: Path, hashes: Mapping[str, str]) -> list[str]:
    """Names of data that are not what they were when a run learnt from them; hashes: what they are now."""
    known: dict[str, str] = read_facts(folder).get("data", {})
    return [name for name, digest in hashes.items() if known.get(name, digest) != digest]


def warn_of_changed_data(folder: Path, config: RunConfig) -> None:
    """Say which data are not what they were when a run was trained, before something is measured on them.

    What is only trained on is not looked at, which may be terabytes.
    """
    unread = find_task(config.task).only_trained_on(config)
    for name in changed_data(folder, data_hashes(config, without=unread)):
        log.warning("%s: data %r is not what it was when the run was trained; numbers are of other data", folder, name)


class Facts:
    """Counts what a run costs from here on, beyond what earlier parts of it have cost.

    known: where the run comes from, where that is known already.
    alone: whether the process does nothing else, so that its memory is the run's.
    """

    def __init__(self, folder: Path, config: RunConfig, known: dict[str, Any] | None = None, *, alone: bool) -> None:
        self.folder, self.config, self.provenance, self.alone = folder, config, known, alone
        self.began, self.before = time.process_time(), memory_now()
        self.earlier: dict[str, Any] = {}

    @functools.cached_property
    def origin(self) -> dict[str, Any]:
        """Where the run comes from."""
        return origin(self.config) if self.provenance is None else self.provenance

    def check(self) -> None:
        """Raise where data are not what an earlier part of the run has learnt from."""
        for name in changed_data(self.folder, self.origin.get("data", {})):
            raise ConfigError(
                f"data: {name!r} is not what it was when this run began; bring it back, or begin anew with --restart"
            )

    def begin(self, *, anew: bool = False, start: str | None = None) -> None:
        """Record where the run comes from; anew: what an earlier one has cost does not count.

        start: the hash of the weights that it begins with now; a run that goes on keeps that of its beginning.
        """
        self.earlier = {} if anew else read_facts(self.folder)
        if start is not None:
            self.earlier["init_from_sha256"] = start
        write_json(self.folder / FACTS, {**self.earlier, **self.origin})

    def end(self, **more: Any) -> None:
        """Add what it cost, and more."""
        spent = time.process_time() - self.began
        memory = memory_peak() - self.before if self.alone else 0
        cost = {
            "processor_seconds": round(spent + self.earlier.get("processor_seconds", 0.0), 3),
            "memory_bytes": max(memory, self.earlier.get("memory_bytes", 0)),
        }
        write_json(self.folder / FACTS, {**self.earlier, **self.origin, **cost, **more})


def memory_peak() -> int:
    """Most bytes that this process has held at once, on the GPU if it used one."""
    import torch

    if torch.cuda.is_available() and torch.cuda.is_initialized():
        return int(torch.cuda.max_memory_allocated())
    if sys.platform == "win32":
        return 0
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return int(peak if sys.platform == "darwin" else peak * 1024)


def memory_now() -> int:
    """Bytes that this process holds before it trains, so that a peak can be counted from there."""
    import torch

    if torch.cuda.is_available():
        return 0
    try:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        return pages * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0
