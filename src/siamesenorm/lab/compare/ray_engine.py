"""Cells on a Ray cluster (extra: ray): the same cells, the same folders, on as many machines as there are.

Where the machines share no disk, a cell's folder travels: what there is of it goes out with the order, and comes back
with the result. A task that is lost with its machine is begun again by Ray.

Where there is no cluster, one of this machine alone is started, which other machines cannot reach: whoever reaches
Ray can run anything.
"""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import io
import os
import sys
import tarfile
import tempfile
import uuid
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from siamesenorm.data.reading import reason_of
from siamesenorm.data.removal import remove_file, scratch_folder
from siamesenorm.data.replacement import Replacement
from siamesenorm.errors import ConfigError
from siamesenorm.lab.compare.cell import CellOrder, run_cell
from siamesenorm.lab.compare.runner import DONE, CellProgress, GridWatcher, Stopping
from siamesenorm.train.folder import CONFIG, FOLDERS, OWN

SECONDS = 0.5
"""Between two looks at what has ended."""
RETRIES = 2
"""Times that a cell is begun again when its machine is lost."""


LOOPBACK = "127.0.0.1"
SWITCH, CONSTANT = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "ENABLE_RAY_CLUSTER"
"""Ray's own switch between a node for others and one at the loopback address, in the environment and once read."""
CURRENT = "ray_current_cluster"
"""Where ``ray start`` leaves the address of this machine's cluster."""


def check_ray() -> None:
    """Raise if it is not installed."""
    if importlib.util.find_spec("ray") is None:
        raise ConfigError.missing_package("--engine: 'ray'", "ray", "ray")


class RayEngine:
    """A Ray cluster: the one that this machine belongs to, or one of this machine alone."""

    def __init__(self, jobs: int | None = None, address: str | None = None) -> None:
        check_ray()
        import ray

        self.ray: Any = ray
        if not ray.is_initialized():
            alone = address is None and not cluster_here()
            with loopback_only() if alone else contextlib.nullcontext():
                self._start("local" if alone else address)
            if alone and ray.util.get_node_ip_address() != LOOPBACK:
                ray.shutdown()
                raise ConfigError(
                    "--engine: 'ray' would listen on every network of this machine; start a cluster where that is "
                    "wanted with ray start --head, or take --engine local"
                )
        resources = ray.cluster_resources()
        self.gpus = int(resources.get("GPU", 0))
        self.jobs = jobs or self.gpus or max(1, int(resources.get("CPU", 1)))

    def _start(self, address: str | None) -> None:
        try:
            self.ray.init(address=address, log_to_driver=False, logging_level="error", include_dashboard=False)
        except Exception as error:  # an address that is none, a cluster that has gone
            raise ConfigError(f"--engine: 'ray' cannot be reached or started: {reason_of(error)}") from None

    def run(self, plan: Sequence[CellProgress], provenance: dict[str, Any], watcher: GridWatcher) -> bool:
        """Run what is not done yet; False if it was interrupted, which has saved what was running."""
        task = self.ray.remote(num_cpus=1, num_gpus=1 if self.gpus else 0, max_retries=RETRIES)(remote_cell)
        waiting = [progress for progress in plan if progress.state not in DONE]
        running: dict[Any, CellProgress] = {}
        with Stopping() as stop, _mark(plan) as mark:
            while running or (waiting and not stop.asked):
                while waiting and len(running) < self.jobs and not stop.asked:
                    progress = waiting.pop(0)
                    order = CellOrder(progress.cell.config.as_dict(), str(progress.folder.resolve()), provenance)
                    running[task.remote(order, packed(progress.folder), str(mark))] = progress
                    progress.state = "running"
                    watcher.changed(progress)
                if stop.asked and not stop.passed_on:
                    stop.passed_on = True
                    for reference in running:
                        self.ray.cancel(reference, force=False)  # an interrupt in the worker, which saves
                ended, _ = self.ray.wait(list(running), timeout=SECONDS) if running else ([], None)
                for reference in ended:
                    self._end(reference, running.pop(reference), watcher)
                watcher.tick()
        return not stop.asked

    def _end(self, reference: Any, progress: CellProgress, watcher: GridWatcher) -> None:
        try:
            message, files = self.ray.get(reference)
            if files is not None:
                unpack(files, progress.folder)
        except self.ray.exceptions.TaskCancelledError:
            message = {"kind": "ended", "state": "interrupted"}  # it had not begun
        except Exception as error:  # whatever became of a machine is the cell's end, not the grid's
            message = {"kind": "failed", "message": " ".join(str(error).split())[-200:]}
        progress.update(message)
        progress.read()
        watcher.changed(progress)


def cluster_here() -> bool:
    """Whether this machine belongs to a cluster that was started for it, as far as Ray would find one."""
    named = os.environ.get("RAY_ADDRESS", "")
    temporary = os.environ.get("RAY_TMPDIR") or ("/tmp" if sys.platform == "linux" else tempfile.gettempdir())
    return (named not in ("", "local")) or (Path(temporary) / "ray" / CURRENT).is_file()


@contextlib.contextmanager
def loopback_only() -> Iterator[None]:
    """What Ray starts meanwhile listens to this machine alone, as it always does on macOS and Windows."""
    constants: Any = importlib.import_module("ray._private.ray_constants")
    before, known = os.environ.get(SWITCH), getattr(constants, CONSTANT, None)
    os.environ[SWITCH] = "0"  # for the processes that Ray starts
    setattr(constants, CONSTANT, False)  # for this one, which has read it already
    try:
        yield
    finally:
        setattr(constants, CONSTANT, known)
        os.environ.pop(SWITCH)
        if before is not None:
            os.environ[SWITCH] = before


@contextlib.contextmanager
def _mark(plan: Sequence[CellProgress]) -> Iterator[Path]:
    """A file beside the cells for as long as the grid runs: who sees it shares this disk."""
    folder = plan[0].folder.resolve().parent
    folder.mkdir(parents=True, exist_ok=True)
    mark = folder / f".{uuid.uuid4().hex}"
    mark.touch()
    try:
        yield mark
    finally:
        remove_file(mark)


def remote_cell(order: CellOrder, files: bytes, mark: str) -> tuple[dict[str, Any], bytes | None]:
    """What a Ray worker does: how it ended, and the folder's files if this machine does not share them."""
    if Path(mark).exists():
        return _ended(order), None
    with scratch_folder(Path(tempfile.gettempdir()), "siamesenorm", 0o700) as scratch:
        place = scratch / Path(order.folder).name
        unpack(files, place)
        return _ended(CellOrder(order.config, str(place), order.provenance, order.threads)), packed(place)


def _ended(order: CellOrder) -> dict[str, Any]:
    try:
        return {"kind": "ended", "state": run_cell(order, lambda message: None)}
    except (ValueError, OSError) as error:
        return {"kind": "failed", "message": " ".join(str(error).split())}


def packed(folder: Path) -> bytes:
    """A folder's files in one piece, nothing where there is no folder."""
    if not folder.is_dir():
        return b""
    text = io.BytesIO()
    with tarfile.open(fileobj=text, mode="w:gz") as archive:
        archive.add(folder, arcname=".")
    return text.getvalue()


def unpack(files: bytes, folder: Path) -> None:
    """The files in a folder, whole or not at all; what others have put there stays."""
    if not files:
        return
    folder.parent.mkdir(parents=True, exist_ok=True)
    with scratch_folder(folder.parent, folder.name) as new:
        with tarfile.open(fileobj=io.BytesIO(files)) as archive:
            archive.extractall(new, filter="data")
        with Replacement() as swap:
            if not folder.exists():
                swap.move(new, folder)
                return
            for name in (CONFIG, *OWN):
                swap.set_aside(folder / name, FOLDERS.get(name))
            for path in sorted(new.iterdir()):
                if not os.path.lexists(folder / path.name):
                    swap.move(path, folder / path.name)
