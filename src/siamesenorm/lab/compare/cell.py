"""One cell of a grid: a training run that tells how it is getting on, most often in a process of its own."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from siamesenorm.data.removal import remove_tree
from siamesenorm.train.display import Display
from siamesenorm.train.folder import CHECKPOINTS, FOLDERS, State

SECONDS_BETWEEN = 0.2
"""Between two reports of one cell."""

Send = Callable[[dict[str, Any]], None]


@dataclass(frozen=True)
class CellOrder:
    """What a process is to do."""

    config: dict[str, Any]
    folder: str
    provenance: dict[str, Any]
    """Facts of the machine and the data, which the whole grid shares."""
    threads: int = 1
    gpu: int | None = None
    model: str | None = None
    """``FILE.py:NAME``, where it is a user's own model."""
    alone: bool = True
    """Whether its process does nothing else."""


def run_cell(order: CellOrder, send: Send) -> State:
    """Train a cell from where it stands."""
    if order.gpu is not None:
        os.environ["CUDA_VISIBLE_DEVICES"] = str(order.gpu)  # before this process touches a GPU
    import torch

    from siamesenorm.lab.compare.own_model import open_model_file
    from siamesenorm.tasks.own import given
    from siamesenorm.train.loop import train
    from siamesenorm.train.recipes import parse_config

    torch.set_num_threads(order.threads)
    with contextlib.nullcontext() if order.model is None else given(open_model_file(order.model)):
        result = train(
            parse_config(order.config),
            order.folder,
            display=Reporter(send),
            provenance={**order.provenance, "threads": order.threads},
            alone=order.alone,
            keep_state=False,
        )
    if result.state in ("finished", "diverged"):
        with contextlib.suppress(OSError):  # it will not go on; its weights are exported
            remove_tree(Path(order.folder) / CHECKPOINTS, FOLDERS[CHECKPOINTS])
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


def work(connection: Any, order: CellOrder) -> None:
    """What a process of the local engine does; every step and the end are sent over the connection."""
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
