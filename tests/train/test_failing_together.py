"""What goes wrong in one process before the first step, or behind the last, ends all of them, soon, with a sentence."""

from __future__ import annotations

import multiprocessing
import os
import signal
import socket
import sys
from pathlib import Path

import pytest
import torch

from siamesenorm.cli import main
from siamesenorm.errors import ConfigError
from siamesenorm.tasks.language import LanguageTask
from siamesenorm.train import engine, loop, recipes, recorder
from siamesenorm.train.folder import RunFolder

from .small_runs import SMALL
from .worlds import PRELOADED

PATIENCE = 90.0
"""Seconds after which a process counts as waiting; without the others' word it waits for ten minutes."""
STAGES = {
    "reading the recipe": (recipes, "resolve"),
    "opening data": (LanguageTask, "__init__"),
    "locking the folder": (RunFolder, "locked"),
    "building the model": (LanguageTask, "build_model"),
    "sharing the model": (engine, "apply_parallelism"),
    "making the optimiser": (engine, "build_optimizer"),
    "starting loaders": (LanguageTask, "loader"),
    "writing the configuration": (RunFolder, "begin"),
    "opening metrics": (recorder, "MetricsFile"),
    "counting frequencies": (LanguageTask, "chance_loss"),
    "finding checkpoints": (loop.CheckpointStore, "latest"),
    "writing events": (RunFolder, "event"),
    "opening trackers": (recorder, "open_trackers"),
    "saving the tokenizer": (LanguageTask, "save_extras"),
}
ERRORS = {
    "sentence": ConfigError("field: 'value' is not allowed"),
    "system": OSError(28, "No space left on device", "file"),
    "defect": RuntimeError("as it happens"),
}
LOSS = "process {}: another process of the run has failed or was lost; its own message says why"


def command(rank: int, port: int, folder: Path, stage: str, kind: str | None) -> None:
    """A process as a user starts it without torchrun, which would end the others itself."""
    output = os.open(folder / f"{rank}.txt", os.O_WRONLY | os.O_CREAT)
    os.dup2(output, 1)
    os.dup2(output, 2)
    os.environ |= {"RANK": str(rank), "WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": str(port)}
    torch.set_num_threads(1)
    if kind is not None:

        def fail(*args, **options):
            if kind == "death":
                os.kill(os.getpid(), signal.SIGKILL)
            raise ERRORS[kind]

        setattr(*STAGES[stage], fail)
    code = 1
    try:
        code = main(["train", "lm-tiny", *SMALL, "parallel.device=cpu", "--run", str(folder / "run")])
    except Exception as defect:  # as the interpreter shows it
        sys.excepthook(type(defect), defect, defect.__traceback__)
    sys.stderr.flush()
    os._exit(code)


# Files are the main process's.
ROWS = [
    (stage, rank, list(ERRORS)[(number + rank) % len(ERRORS)])
    for number, stage in enumerate(STAGES)
    for rank in ((0,) if STAGES[stage][0] in (RunFolder, recorder) or "saving" in stage else (number % 2,))
]


@pytest.mark.parametrize(("stage", "rank", "kind"), [*ROWS, ("building the model", 1, "death")])
def test_an_error_of_one_process_ends_all(tmp_path, stage, rank, kind):
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(PRELOADED)
    processes = [
        context.Process(target=command, args=(each, port, tmp_path, stage, kind if each == rank else None))
        for each in range(2)
    ]
    for process in processes:
        process.start()
    try:
        for process in processes:
            process.join(PATIENCE)
        said = [(tmp_path / f"{each}.txt").read_text() for each in range(2)]
        codes = [process.exitcode for process in processes]
    finally:
        for process in processes:
            process.kill()
            process.join()
    assert set(codes) <= {1, 2, -signal.SIGKILL}, said
    for each in range(2):
        sentences = [line for line in said[each].splitlines() if line.startswith("siamesenorm: ")]
        wordless = each == rank and kind in ("defect", "death")
        assert len(sentences) == (0 if wordless else 1), said
        assert ("Traceback" in said[each]) == (each == rank and kind == "defect"), said
    if kind == "death" or stage in ("sharing the model", "finding checkpoints"):  # all wait for all there
        expected = LOSS.format(1 - rank)
    else:
        expected = str(ERRORS[kind].strerror if kind == "system" else ERRORS[kind])
    assert expected in said[1 - rank]
