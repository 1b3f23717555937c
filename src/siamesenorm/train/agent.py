"""torchrun's agent, which started this process: a worker does not outlive it.

An agent that is killed leaves its workers behind. They would go on with no agent to start them again, hold their GPUs
and the run's lock, and the next agent on the machine would wait. So a worker watches its agent: once that is gone
it gets SIGTERM, at which a run saves its step and stops, with the processes of other machines. What has not ended by
then, since it waits for a process that is gone too, ends when torchrun would have ended it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import sys
import threading
import time

STARTED = "TORCHELASTIC_RUN_ID"
"""What torchrun writes into the environment of workers."""
PATIENCE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""Seconds that torchrun gives workers between SIGTERM and SIGKILL; 30 by default."""
_watching: list[threading.Thread] = []


def watch_agent() -> None:
    """From now on, end when the agent does; nothing where torchrun did not start this process."""
    if STARTED not in os.environ or sys.platform == "win32" or _watching:
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
