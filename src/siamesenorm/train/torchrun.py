"""What torchrun gives a process: its place among others, the store in which they first meet, and the agent above it.

A process that cannot go on says so in the store, so that nobody waits for it: `meet` fails in all of them with its
sentence.

An agent that is killed leaves its workers behind. They would go on with no agent to start them again, hold their GPUs
and the run's lock, and the next agent on the machine would wait. So a worker watches its agent: once that is gone it
gets SIGTERM, at which a run saves its step and stops, with the processes of other machines. What has not ended by then,
since it waits for a process that is gone too, ends when torchrun would have ended it.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import select
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass
from datetime import timedelta

import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, Store, TCPStore

from siamesenorm.errors import ConfigError

MOST_PORTS = 65535
FAREWELL = timedelta(seconds=30)
"""How long a process that cannot go on stays to tell the others."""
_meetings = itertools.count()
RUN_ID = "TORCHELASTIC_RUN_ID"
"""What torchrun writes into the environment of workers."""
PATIENCE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Seconds that torchrun gives workers between SIGTERM and SIGKILL; 30 by default."""
_watching: list[threading.Thread] = []


@dataclass(frozen=True)
class ProcessPlace:
    """Which of how many processes this one is, in the run and on its machine."""

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    local_size: int = 1

    @classmethod
    def from_environment(cls) -> ProcessPlace:
        """As torchrun writes it; without it there is one process."""
        size = _number("WORLD_SIZE", 1, least=1)
        rank = _number("RANK", 0, most=size - 1, where=f"with WORLD_SIZE = {size} ")
        local_size = _number("LOCAL_WORLD_SIZE", 1, least=1, most=size, where=f"with WORLD_SIZE = {size} ")
        here = f"with LOCAL_WORLD_SIZE = {local_size} " if "LOCAL_WORLD_SIZE" in os.environ else ""
        local_rank = _number("LOCAL_RANK", 0, most=(local_size if here else size) - 1, where=here)
        return cls(rank, size, local_rank, local_size)

    @property
    def hosts(self) -> bool:
        """Whether the store lives in this process, not in torchrun's."""
        return self.rank == 0 and not _by_agent()


def meet(place: ProcessPlace, timeout: timedelta) -> Store:
    """The store, as soon as all processes are there; raises in all of them if one cannot go on."""
    store = _open_store(place, timeout)
    try:
        if store.add("arrived", 1) == place.size:
            store.set("verdict", "")
        problem = store.get("verdict").decode()
    except dist.DistError:
        raise ConfigError(
            f"WORLD_SIZE: {place.size} processes did not come together within {timeout.total_seconds():.0f} seconds"
        ) from None
    if problem:
        _leave(place, store)
        raise ConfigError(problem)
    return store


def was_restarted() -> bool:
    """Whether torchrun has started the processes of this run again, with the command of the first time."""
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


def refuse(problem: str) -> None:
    """Tell the other processes, if there are any, why this one cannot go on; each of them then ends with that."""
    with contextlib.suppress(ConfigError, dist.DistError):  # no other process is there
        place = ProcessPlace.from_environment()
        if place.size > 1:
            store = _open_store(place, FAREWELL)
            store.set("verdict", of_process(place.rank, problem))
            _leave(place, store)


def of_process(rank: int, problem: str) -> str:
    """A sentence for all processes about what is wrong in one; the main one's is everybody's."""
    return problem if rank == 0 else f"process {rank}: {problem}"


def _leave(place: ProcessPlace, store: Store) -> None:
    """The last to leave says so; the host of the store waits for that."""
    if store.add("left", 1) == place.size:
        store.set("empty", "")
    if place.hosts:
        with contextlib.suppress(dist.DistError):
            store.wait(["empty"], FAREWELL)


def _by_agent() -> bool:
    return os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"


def _open_store(place: ProcessPlace, timeout: timedelta) -> Store:
    """A key-value store with names of its own for every restart and every meeting.

    torchrun may keep one store through all restarts of its workers. Without the prefix a restarted process can read
    the address of one that has died and wait for it until the timeout.
    """
    host, port = os.environ.get("MASTER_ADDR") or "localhost", _number("MASTER_PORT", 29500, least=1, most=MOST_PORTS)
    try:
        store = TCPStore(
            host,
            port,
            place.size,
            is_master=place.hosts,
            timeout=timeout,
            multi_tenant=not _by_agent(),
            wait_for_workers=False,
        )
    except (dist.DistError, RuntimeError, socket.gaierror) as error:
        raise ConfigError(
            f"MASTER_ADDR, MASTER_PORT: no process answers at {host}:{port} ({str(error).splitlines()[0]})"
        ) from None
    run, restart = os.environ.get(RUN_ID, "none"), os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return PrefixStore(f"siamesenorm/{run}/{restart}/{next(_meetings)}", store)


def _number(variable: str, default: int, *, least: int = 0, most: int | None = None, where: str = "") -> int:
    text = os.environ.get(variable, "")
    try:
        number = int(text) if text else default
    except ValueError:
        raise ConfigError.not_allowed(variable, text[:40], "a whole number") from None
    if number < least or (most is not None and number > most):
        allowed = f"{least} or more" if most is None else f"{least} to {most}" if most > least else str(least)
        raise ConfigError.refused(variable, number, f"{where}it takes {allowed}")
    return number


def watch_agent() -> None:
    """From now on, end when the agent does; nothing where torchrun did not start this process."""
    if RUN_ID not in os.environ or sys.platform == "win32" or _watching:
        return
    thread = threading.Thread(target=_watch, args=(os.getppid(),), name="agent", daemon=True)
    _watching.append(thread)
    thread.start()


def _watch(agent: int) -> None:
    wait_for_end(agent)
    with contextlib.suppress(OSError, ValueError):  # where it went is gone too
        print(f"siamesenorm: torchrun's agent {agent} is gone; this process stops too", file=sys.stderr, flush=True)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(_patience())
    os._exit(128 + signal.SIGTERM)


def wait_for_end(parent: int) -> None:
    """Return as soon as this process's parent has ended."""
    try:
        ended = os.pidfd_open(parent)
    except (AttributeError, OSError):  # no Linux, an old one, or gone already
        while os.getppid() == parent:
            time.sleep(1)
        return
    try:
        end = select.poll()
        end.register(ended, select.POLLIN)
        while os.getppid() == parent:  # else the number may be another's by now
            end.poll(60_000)
    finally:
        os.close(ended)


def _patience() -> float:
    try:
        return max(1.0, float(os.environ.get(PATIENCE, "30")))
    except ValueError:
        return 30.0
