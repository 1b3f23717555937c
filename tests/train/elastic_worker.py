"""A worker for torchrun that trains a recipe and kills where it is told to: ``RANK:STEP`` for each restart in turn.

``RANK:STEP`` ends the worker itself; ``agent:STEP`` ends torchrun's agent, and the worker goes on.
"""

from __future__ import annotations

import os
import signal
import sys

import torch

from siamesenorm.train.engine import Engine
from siamesenorm.train.loop import train
from siamesenorm.train.recipes import resolve


def work(recipe: str, folder: str, *deaths: str) -> None:
    restart, rank = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), int(os.environ["RANK"])
    torch.set_num_threads(1)
    take = Engine.apply

    def apply(engine: Engine, step: int) -> None:
        if restart < len(deaths) and deaths[restart] == f"{rank}:{step}":
            os.kill(os.getpid(), signal.SIGKILL)
        if restart < len(deaths) and deaths[restart] == f"agent:{step}":
            os.kill(os.getppid(), signal.SIGKILL)
        take(engine, step)

    Engine.apply = apply  # type: ignore[method-assign]
    with open(f"{folder}.workers", "a") as file:
        file.write(f"{os.getpid()}\n")
    result = train(resolve(recipe), folder)
    sys.exit(0 if result.state == "finished" else 1)


if __name__ == "__main__":
    work(*sys.argv[1:])
