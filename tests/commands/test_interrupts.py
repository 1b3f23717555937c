"""Ctrl-C however often, and a terminal that is closed: no trace, nothing damaged, and the same command goes on."""

from __future__ import annotations

import fcntl
import multiprocessing
import multiprocessing.connection
import os
import pty
import signal
import subprocess
import sys
import termios
import threading
from pathlib import Path

import pytest
import torch

from siamesenorm.__main__ import run
from siamesenorm.train import engine, loop
from siamesenorm.train.checkpoint.store import CheckpointStore
from siamesenorm.train.folder import RunFolder
from siamesenorm.train.loop import train
from train.small_runs import SMALL, losses, tiny
from train.worlds import PRELOADED

OVERRIDES = [*SMALL, "checkpoint.every=2", "model.dropout=0.1"]
MOMENTS = {"building": (engine, "checkpoint_activations"), "saving": (CheckpointStore, "save")}


class Falling:
    """Ends where an exception cannot: it is shown and forgotten."""

    def __del__(self) -> None:
        for _ in range(3):
            os.kill(os.getpid(), signal.SIGINT)


def hail() -> None:
    """Interrupts without end."""
    while True:
        os.kill(os.getpid(), signal.SIGINT)


def interrupted(moment: str, folder: Path) -> None:
    """The command, where interrupts come from a moment on."""
    as_a_terminal_starts_it(folder)
    if moment in MOMENTS:
        plain = getattr(*MOMENTS[moment])

        def watched(*args, **options):
            threading.Thread(target=hail, daemon=True).start()
            return plain(*args, **options)

        setattr(*MOMENTS[moment], watched)
    else:
        plain = engine.Engine.apply
        engine.Engine.apply = lambda self, step: (plain(self, step), Falling())[0]
    sys.argv = command(folder)
    os._exit(run())


def command(folder: Path) -> list[str]:
    return ["siamesenorm", "train", "lm-tiny", *OVERRIDES, "--run", str(folder / "run")]


def as_a_terminal_starts_it(folder: Path) -> None:
    output = os.open(folder / "said.txt", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    os.dup2(output, 1)
    os.dup2(output, 2)
    torch.set_num_threads(1)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGHUP})
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGHUP, signal.SIG_DFL)


def start(target, *args):
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    process = context.Process(target=target, args=args)
    process.start()
    return process


@pytest.fixture(scope="module")
def alone(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    assert train(tiny("checkpoint.every=2", "model.dropout=0.1"), folder).state == "finished"
    return folder


@pytest.mark.parametrize("moment", [*MOMENTS, "where no exception goes", "from the first line to the last moment"])
def test_many_interrupts_leave_no_trace_and_no_damage(tmp_path, alone, moment):
    if moment.startswith("from"):
        process = subprocess.Popen([sys.executable, "-m", *command(tmp_path)], stderr=subprocess.PIPE, text=True)
        lines = [process.stderr.readline()]
        reader = threading.Thread(target=lambda: lines.extend(process.stderr))
        reader.start()
        while process.poll() is None:
            process.send_signal(signal.SIGINT)
        reader.join()
        code, said = process.returncode or 130, "".join(lines)  # it may have been faster
    else:
        started = start(interrupted, moment, tmp_path)
        started.join(120)
        code, said = started.exitcode, (tmp_path / "said.txt").read_text()
    assert code in (130, -signal.SIGINT), said
    for sign in ("Traceback", "KeyboardInterrupt", "ignored"):
        assert sign not in said
    assert train(tiny("checkpoint.every=2", "model.dropout=0.1"), tmp_path / "run").state == "finished"
    assert losses(tmp_path / "run") == losses(alone)
    ours, theirs = ((folder / "weights.safetensors").read_bytes() for folder in (tmp_path / "run", alone))
    assert ours == theirs


def on_a_terminal(name: str, folder: Path) -> None:
    """The command as the first process of a terminal's session, which says when it has begun to train."""
    as_a_terminal_starts_it(folder)
    os.setsid()
    terminal = os.open(name, os.O_RDWR)
    fcntl.ioctl(terminal, termios.TIOCSCTTY, 0)
    for descriptor in (0, 1, 2):
        os.dup2(terminal, descriptor)
    os.close(terminal)
    sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
    plain = loop.Loop.take_step

    def take_step(self):
        verdict = plain(self)
        if self.step == 3:
            os.write(1, b"three steps")
        return verdict

    loop.Loop.take_step = take_step
    sys.argv = [*command(folder), "steps=100000", "train.compile=false"]  # which so many steps would be worth
    os._exit(run())


def test_a_closed_terminal_saves_as_sigterm_does(tmp_path):
    ours, theirs = pty.openpty()
    process = start(on_a_terminal, os.ttyname(theirs), tmp_path)
    seen = b""
    while b"three steps" not in seen and ours in multiprocessing.connection.wait([ours, process.sentinel], 120):
        seen += os.read(ours, 1024)
    os.close(theirs)
    os.close(ours)
    process.join(120)
    assert process.exitcode == 128 + signal.SIGHUP, seen
    status = RunFolder(tmp_path / "run").status()
    assert (status["state"], status["message"].partition(":")[0]) == ("interrupted", "SIGHUP")
    assert (tmp_path / "run" / "checkpoints" / f"step-{status['step']:08d}").is_dir()
