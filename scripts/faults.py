"""Kill a training run again and again, resume it each time, and compare its end with that of a run left alone.

    python scripts/faults.py --kills 300 --seed 1

Every run is a process of its own, forked from this one so that nothing is imported twice. It is ended in one of
three ways, chosen by the seed together with the moment:

  step    SIGKILL from outside, after some steps were reported through a pipe
  file    SIGKILL at the moment it opens, makes, renames or removes a certain file or folder of the run
  term    SIGTERM after some steps; it must save that very step

After each end the next process must resume from the newest checkpoint that was published. A run that comes to its
end must have bitwise the weights and losses of the run that was left alone. Then the next run begins, until all kills
are done. The summary goes to standard output as JSON; the exit code is 1 if anything differed.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import signal
import sys
import tempfile
import traceback
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import torch

from siamesenorm.tasks import find_task
from siamesenorm.train.config import RunConfig
from siamesenorm.train.display import Display
from siamesenorm.train.folder import CHECKPOINTS, WEIGHTS, read_metrics
from siamesenorm.train.loop import train
from siamesenorm.train.recipes import resolve

STEPS, EVERY = 24, 3
FINISHED, FAILED, INTERRUPTED = 0, 1, 43
WAYS = ("step", "file", "file", "term")
TOUCHES = ("open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.truncate")
MOST_TOUCHES = 120
"""A whole run touches about 250; what is resumed has fewer left."""


def tiny_run(folder: Path, topology: str) -> RunConfig:
    """A run of a second or two whose every step matters: dropout, averaged weights, shuffled data."""
    tokens = folder / "tokens.npy"
    np.random.default_rng(0).integers(0, 256, 20_000).astype(np.uint16).tofile(tokens)
    changes = [
        "model.dim=16", "model.blocks=2", "model.heads=2", "model.ffn_dim=32", "model.dropout=0.1",
        f"model.topology={topology}", f"data.train={tokens}", "data.sequence_length=16", "train.batch_size=4",
        "train.ema=0.9", f"train.steps={STEPS}", "schedule.warmup=4", f"checkpoint.every={EVERY}",
        "evaluation.every=null", "logging.every=1", "logging.tensorboard=false", "logging.peak_flops=1e9",
        "divergence.spike=null", "divergence.plateau=null", "parallel.device=cpu",
    ]  # fmt: skip
    return resolve("lm-tiny", changes)


class Reporting(Display):
    """Sends a byte for every step."""

    def __init__(self, pipe: int) -> None:
        self.pipe = pipe

    def step(self, record: dict[str, Any], unit: str, rate: float) -> None:
        """One more."""
        os.write(self.pipe, b".")


def kill_at_touch(folder: Path, number: int) -> None:
    """End this process with SIGKILL when it touches the run's files for the number-th time."""
    left, within = number, str(folder)

    def watch(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in TOUCHES and isinstance(arguments[0], (str, os.PathLike)):
            left -= str(arguments[0]).startswith(within)
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(watch)


def start(config: RunConfig, folder: Path, touches: int | None = None) -> tuple[int, int]:
    """Fork a process that trains; its id and the pipe on which it reports."""
    reading, writing = os.pipe()
    child = os.fork()
    if child:
        os.close(writing)
        return child, reading
    code = FAILED
    try:
        os.close(reading)
        if touches is not None:
            kill_at_touch(folder, touches)
        result = train(config, folder, display=Reporting(writing))
        code = {"finished": FINISHED, "interrupted": INTERRUPTED}.get(result.state, FAILED)
    except BaseException:
        traceback.print_exc()
    finally:
        os._exit(code)


def attempt(config: RunConfig, folder: Path, way: str, chance: random.Random) -> tuple[str, int]:
    """Run until killed in this way or finished: how it ended, and the steps it reported."""
    touches = chance.randint(1, MOST_TOUCHES) if way == "file" else None
    after = chance.randint(0, STEPS // 2) if way in ("step", "term") else None
    child, pipe = start(config, folder, touches)
    steps, asked = 0, False
    while True:
        if after is not None and steps >= after and not asked and (way == "step" or steps > 0):
            os.kill(child, signal.SIGKILL if way == "step" else signal.SIGTERM)
            asked = True
        reported = os.read(pipe, 1)
        if not reported:
            break
        steps += 1
    os.close(pipe)
    _, status = os.waitpid(child, 0)
    if os.WIFSIGNALED(status):
        return ("killed" if os.WTERMSIG(status) == signal.SIGKILL else f"signal {os.WTERMSIG(status)}"), steps
    return {FINISHED: "finished", INTERRUPTED: "interrupted"}.get(os.WEXITSTATUS(status), "failed"), steps


def published(folder: Path) -> int:
    """The newest step that has a place among the checkpoints."""
    return max((int(p.name.split("-")[1]) for p in (folder / CHECKPOINTS).glob("step-*")), default=0)


def began_at(folder: Path) -> int:
    """The step from which the last process went on."""
    lines = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if line["event"] in ("started", "resumed")][-1]


def outcome(folder: Path) -> tuple[bytes, list[tuple[int, float, float]]]:
    """The weights' bytes, and step, loss and gradient norm of every step."""
    lines = [(r["step"], r["loss"], r["grad_norm"]) for r in read_metrics(folder) if "loss" in r]
    return (folder / WEIGHTS).read_bytes(), lines


def campaign(folder: Path, kills: int, seed: int, topology: str = "siamese") -> dict[str, Any]:
    """All kills, run after run; a summary with what differed."""
    chance, problems, ends = random.Random(seed), [], Counter[str]()
    config = tiny_run(folder, topology)
    find_task(config.task)(config).build_model()  # what is first used here, every process would import again
    how, _ = attempt(config, folder / "alone", "alone", chance)
    if how != "finished":
        return {"kills": 0, "problems": [f"the run that is left alone ended as {how}"]}
    expected = outcome(folder / "alone")
    runs = done = tries = 0
    while done < kills and len(problems) < 10:
        runs += 1
        run, how = folder / f"run-{runs}", ""
        while how != "finished" and len(problems) < 10:
            before = published(run)
            way = WAYS[tries % len(WAYS)] if done < kills else "alone"  # in turn, so that few kills try all ways
            tries += 1
            how, steps = attempt(config, run, way, chance)
            if how not in ("killed", "interrupted", "finished"):
                problems.append(f"run {runs}: {way} ended as {how}")
            done += how in ("killed", "interrupted")
            ends[f"{way}: {how}"] += 1
            if steps and began_at(run) != before:
                problems.append(f"run {runs}: went on from step {began_at(run)} instead of {before}")
            if how == "interrupted" and published(run) != began_at(run) + steps:
                problems.append(f"run {runs}: SIGTERM at step {began_at(run) + steps} saved step {published(run)}")
        weights, lines = outcome(run) if how == "finished" else (b"", [])
        if weights != expected[0]:
            problems.append(f"run {runs}: other weights than the run that was left alone")
        if lines != expected[1]:
            problems.append(f"run {runs}: other losses than the run that was left alone")
    return {"kills": done, "runs": runs, "seed": seed, "ends": dict(sorted(ends.items())), "problems": problems}


def main() -> int:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--kills", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--topology", default="siamese")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory(prefix="faults-") as folder:
        summary = campaign(Path(folder), arguments.kills, arguments.seed, arguments.topology)
    print(json.dumps(summary, indent=1))
    return 1 if summary["problems"] else 0


if __name__ == "__main__":
    sys.exit(main())
