"""One cell, run in a process of its own: training, and what it cost.

Beside a run's other files it leaves cell.json: processor time, memory, versions, machine and hashes of the data.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field

from siamesenorm.data.atomic import write_json
from siamesenorm.data.errors import DataError
from siamesenorm.data.reading import read_model
from siamesenorm.data.removal import remove_tree
from siamesenorm.train.display import Display
from siamesenorm.train.folder import CHECKPOINTS, FOLDERS, AsWritten, State

FACTS = "cell.json"
SECONDS_BETWEEN = 0.2
"""Between two reports of one cell."""

Send = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class Order:
    """What a process is to do."""

    config: dict[str, Any]
    folder: str
    provenance: dict[str, Any]
    """Facts of the machine and the data, which the whole grid shares."""
    threads: int = 1
    gpu: int | None = None


def run_cell(order: Order, send: Send) -> State:
    """Train a cell from where it stands, and leave what it cost beside it."""
    if order.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(order.gpu)  # before this process touches a GPU
    import torch

    from siamesenorm.tasks import find_task
    from siamesenorm.train.loop import train
    from siamesenorm.train.recipes import parse_config

    torch.set_num_threads(order.threads)
    config = parse_config(order.config)
    chance = find_task(config.task)(config).chance_loss()  # the data are in memory before that is measured
    began, before = time.process_time(), memory_now()
    result = train(config, order.folder, display=Reporter(send))
    folder = Path(order.folder)
    earlier = read_facts(folder)
    facts = {
        **order.provenance,
        "threads": order.threads,
        "processor_seconds": round(time.process_time() - began + earlier.get("processor_seconds", 0.0), 3),
        "memory_bytes": max(memory_peak() - before, earlier.get("memory_bytes", 0)),
        "chance_loss": chance,
    }
    write_json(folder / FACTS, facts)
    if result.state in ("finished", "diverged"):
        with contextlib.suppress(OSError):  # it will not go on; its weights are exported
            remove_tree(folder / CHECKPOINTS, FOLDERS[CHECKPOINTS])
    return result.state


class Reporter(Display):
    """Tells the process that shows the grid how a cell is getting on."""

    def __init__(self, send: Send) -> None:
        self.send, self.last = send, 0.0

    def start(self, step: int, steps: int) -> None:
        """It begins or goes on."""
        self.send({"kind": "started", "step": step, "steps": steps})

    def step(self, record: dict[str, Any], unit: str, rate: float) -> None:
        """Now and then."""
        now = time.monotonic()
        if now - self.last >= SECONDS_BETWEEN:
            self.last = now
            self.send({"kind": "step", "step": record["step"], "loss": record["loss"]})

    def evaluation(self, step: int, metrics: dict[str, float]) -> None:
        """Held-out numbers."""
        self.send({"kind": "evaluation", "step": step, "metrics": metrics})


def work(connection: Any, order: Order) -> None:
    """What a process of the local engine does; the connection hears of every step and of the end."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C reaches all processes; the first one asks the others
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)  # a cell is a world of its own

    def send(message: dict[str, Any]) -> None:
        try:
            connection.send(message)
        except OSError:  # nobody listens any more: save and stop
            os.kill(os.getpid(), signal.SIGTERM)

    try:
        state = run_cell(order, send)
        send({"kind": "ended", "state": state})
    except (Exception, KeyboardInterrupt) as error:
        send({"kind": "failed", "message": " ".join(str(error).split()) or type(error).__name__})
        if not isinstance(error, (ValueError, OSError, KeyboardInterrupt)):
            raise  # a defect shows its trace
    finally:
        with contextlib.suppress(OSError):
            connection.close()


class Machine(AsWritten):
    """Where a cell was trained."""

    processor: str
    cores: int
    system: str


class GraftFacts(AsWritten):
    """The trained model that a comparison went on from; see `siamesenorm.lab.grafts`."""

    source: str
    topology: str
    weights: str
    starts: dict[str, str]
    certificates: dict[str, dict[str, Any]]
    before: list[dict[str, Any]]


class CellFile(AsWritten):
    """What is read of cell.json."""

    command: str = ""
    versions: dict[str, str] = Field(default_factory=dict)
    machine: Machine = Machine(processor="", cores=0, system="")
    data: dict[str, str] = Field(default_factory=dict)
    processor_seconds: float = 0
    memory_bytes: float = 0
    chance_loss: float | None = None
    graft: GraftFacts | None = None


def read_facts(folder: Path) -> dict[str, Any]:
    """What cell.json says, nothing if it is not there or not sound."""
    try:
        return read_model(folder / FACTS, CellFile, "run").model_dump(exclude_unset=True)
    except DataError:
        return {}


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
