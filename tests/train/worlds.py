"""Worlds of several processes on one machine.

The processes come from a fork server: it has imported torch once and runs no thread, while a test's process has
threads (stores, gloo, pytest-xdist) whose locks a plain fork would copy in whatever state they are in.
"""

from __future__ import annotations

import contextlib
import faulthandler
import io
import multiprocessing
import os
import pickle
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch.distributed as dist

import machine
from siamesenorm.train.config import ParallelConfig
from siamesenorm.train.distributed import World

PATIENCE = 300.0
"""Seconds after which a world counts as hung."""
PRELOADED = [
    "siamesenorm.train.loop",
    "siamesenorm.train.parallel.parallelize",
    "siamesenorm.models.lm",
    "torch._dynamo",
    "torch.utils.tensorboard",
    "diffusers.schedulers.scheduling_dpmsolver_multistep",
    "pytest",
]


class Layout(NamedTuple):
    """How processes share the work; parts: micro-batches of a process."""

    mode: str
    group: int | None = None
    ep: int = 1
    pp: int = 1
    schedule: str = "1f1b"
    parts: int = 1
    blocks: int = 2
    processes: int = 4

    def of(self, world: World) -> World:
        """The same processes in this layout."""
        places = (world.rank, world.size, world.local_rank, world.local_size)
        return World(*places, None, self.mode, self.group, ep=self.ep, pp=self.pp)


def run_world(
    size: int, work: Callable[..., Any], *args: Any, mode: str = "ddp", group: int | None = None, pp: int = 1
) -> list[Any]:
    """``work(world, *args)`` in every process of a world; what each returned, in order of rank.

    ``work`` is a function of a test module and ``args`` are pickled: nothing else of the test's process goes along.
    """
    server = dist.TCPStore("localhost", 0, is_master=True, wait_for_workers=False)  # the system chooses the port
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    parallel = ParallelConfig(mode=mode, group=group, pp=pp, device="cpu", timeout=PATIENCE)  # type: ignore[arg-type]
    processes, pipes = [], []
    for rank in range(size):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_process, args=(sender, rank, size, server.port, parallel, machine.current, work, args)
        )
        process.start()
        sender.close()
        processes.append(process)
        pipes.append(receiver)
    try:
        answers = [_receive(pipe) for pipe in pipes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    for rank, (result, problem) in enumerate(answers):
        assert problem is None, f"process {rank}:\n{problem}"
        assert result is not None
    return [result[0] for result, _ in answers]


def run_commands(
    size: int, commands: list[list[str]], folder: Path, prepare: Callable[[], object]
) -> list[list[tuple[int, str, str]]]:
    """Commands of `siamesenorm`, one after the other in every process as torchrun starts it, behind ``prepare()``.

    Exit code, standard output and standard error of each, for each process.
    """
    return run_world(size, _commands, commands, folder, prepare)


def _commands(
    world: World, commands: list[list[str]], folder: Path, prepare: Callable[[], object]
) -> list[tuple[int, str, str]]:
    from siamesenorm.cli import main

    prepare()
    world.close()  # a command meets the others by itself
    found = []
    for command in commands:
        out, err = io.StringIO(), io.StringIO()
        with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err), contextlib.chdir(folder):
            code = main(command)
        found.append((code, out.getvalue(), err.getvalue()))
    world.__init__()  # type: ignore[misc]  # alone, at the end
    return found


def _receive(pipe: Any) -> tuple[Any, str | None]:
    if not pipe.poll(PATIENCE):
        return None, "no answer"
    try:
        return pickle.loads(pipe.recv_bytes())
    except EOFError:
        return None, "the process died"


def _process(
    sender: Any,
    rank: int,
    size: int,
    port: int,
    parallel: ParallelConfig,
    computing: machine.Machine,
    work: Callable[..., Any],
    args: Any,
) -> None:
    computing.settle()
    faulthandler.dump_traceback_later(PATIENCE / 2, file=sys.__stderr__)
    os.environ |= {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": str(port),
        "TORCHELASTIC_USE_AGENT_STORE": "True",
    }
    try:
        world = World.start(parallel)
        result = work(world, *args)
        world.barrier()
        sender.send_bytes(pickle.dumps(((result,), None)))
    except BaseException:
        sender.send_bytes(pickle.dumps((None, traceback.format_exc())))
    sender.close()
    os._exit(0)
