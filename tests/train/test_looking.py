"""Looking never changes training: evaluation, samples, lm-eval, checkpoints and logs leave every loss as it is.

One row for each task and each way to spread a model; held-out data divide unevenly among the processes.
"""

from __future__ import annotations

import functools
import random
from pathlib import Path

import numpy as np
import pytest
import torch

from data.images.files import some_pixels, write_idx
from siamesenorm.tasks import harness
from siamesenorm.tasks.fidelity import classifier
from siamesenorm.train.distributed import World
from siamesenorm.train.engine import Engine
from siamesenorm.train.folder import read_metrics
from siamesenorm.train.loop import train
from siamesenorm.train.recipes import resolve

from .worlds import run_world

SMALL = [
    "dim=16", "blocks=1", "heads=4", "ffn_dim=32", "train.batch_size=8", "warmup=1", "steps=3", "peak_flops=1e9",
    "parallel.device=cpu", "train.ema=null", "checkpoint.every=null", "evaluation.every=null", "tensorboard=false",
]  # fmt: skip
LOOKED = ["evaluation.every=1", "checkpoint.every=2", "logging.every=1", "tensorboard=true"]
"""A checkpoint only behind every second evaluation: what one leaves behind, the other may clear away."""
TASKS = {
    "language": (
        ["lm-tiny", "data.train=arithmetic:problems=240", "sequence_length=16", "model.max_length=64"],
        ["evaluation.sequences=9", "evaluation.at_once=1", "evaluation.arithmetic=3", "lm_eval=[stub]"],
    ),
    "classification": (["deit-digits", "data.train=images"], ["evaluation.at_once=2"]),
    "diffusion": (
        ["dit-digits", "data.train=images"],
        ["evaluation.at_once=2", "evaluation.samples=9", "sampling_steps=2"],
    ),
}
KINDS = {"alone": [], "looked": LOOKED, "averaged": ["train.ema=0.5", *LOOKED]}
WORLDS = {2: {"ddp": None, "fsdp": None}, 4: {"hsdp": 2, "tp": 2}}
"""Modes by the processes they take to be themselves, with the processes of a group."""
BARE = {"one language", "one classification", "one diffusion", "ddp diffusion", "fsdp language"}
"""Rows that are looked at without averaged weights too, with which more is done: each task, and each mode of two."""


def write_images(folder: Path) -> None:
    """Some for training, and nine that are held out."""
    folder.mkdir()
    for name, count in (("train", 40), ("t10k", 9)):
        write_idx(folder / f"{name}-images-idx3-ubyte", some_pixels(count, 8, 8, 1)[..., 0])
        write_idx(folder / f"{name}-labels-idx1-ubyte", (np.arange(count) % 10).astype(np.uint8))


def run_tasks(model, tokenizer, names, max_length, sharing):
    """What the lm-evaluation-harness does to a process and asks of a model."""
    random.seed(0)
    np.random.seed(1234)
    torch.manual_seed(1234)
    adapter = harness.make_adapter(object, model, tokenizer, max_length, sharing)
    likely = adapter.loglikelihood([Asked("a", "bc"), Asked("longer", "d"), Asked("", "e")])
    (whole,) = adapter.loglikelihood_rolling([Asked("some text")])
    answers = adapter.generate_until([Asked(text, {"max_gen_toks": 2}) for text in ("abc", "def", "ghi")])
    found = {f"likelihood {number}": total for number, (total, _) in enumerate(likely)}
    return {"lm_eval/asked/whole": whole, "lm_eval/asked/answers": len(answers), **found}, {}


class Asked:
    def __init__(self, *args) -> None:
        self.args = args


def eager_looks() -> None:
    """Everything that is measured at the end of a run is measured every time; samples need no good classifier."""
    harness.check_tasks, harness.run_tasks = lambda names: None, run_tasks
    Engine.evaluate = functools.partialmethod(Engine.evaluate, final=True)
    classifier.LEAST_STEPS = classifier.MOST_STEPS = 2


def seen_in(row: str) -> tuple[str, ...]:
    """What is looked at beside a run that is left alone."""
    return ("looked", "averaged") if row in BARE else ("averaged",)


def runs_in(world: World, folder: Path, task: str, seen: tuple[str, ...]) -> dict[str, list[tuple[float, ...]]]:
    """Step, loss and gradient norm of every kind of run, and all that was measured of one that was looked at."""
    (recipe, *small), looks = TASKS[task]
    found = {}
    for kind in ("alone", *seen):
        changes = KINDS[kind]
        small = [word.replace("=images", f"={folder.parent / 'images'}") for word in small]
        config = resolve(recipe, [*small, *SMALL, *(looks if changes else []), *changes])
        train(config, folder / kind, world=world)
        world.barrier()
        records = read_metrics(folder / kind)
        found[kind] = [(r["step"], r["loss"], r["grad_norm"]) for r in records if "loss" in r]
        found[f"{kind}, held out"] = [(r["step"], r["evaluation"]) for r in records if "evaluation" in r]
    return found


def sweep(world: World, folder: Path, modes: dict[str, int | None]) -> dict[str, dict[str, list[tuple[float, ...]]]]:
    """All rows of a world's modes, in the same processes."""
    eager_looks()
    found = {}
    for mode, group in modes.items():
        spread = World(world.rank, world.size, world.local_rank, world.local_size, world.device, mode, group)
        for task in TASKS:
            row = f"{mode} {task}"
            found[row] = runs_in(spread, folder / f"{mode}-{task}", task, seen_in(row))
    return found


def check_rows(rows: dict[str, dict[str, list[tuple[float, ...]]]], expected: set[str]) -> None:
    assert rows.keys() == expected
    for row, found in rows.items():
        assert len(found["alone"]) == 3, row
        for kind in seen_in(row):
            assert found[kind] == found["alone"], (row, kind)


@pytest.fixture(scope="module")
def one(tmp_path_factory) -> dict[str, dict[str, list[tuple[float, ...]]]]:
    folder = tmp_path_factory.mktemp("one")
    write_images(folder / "images")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        for place, name in ((harness, "check_tasks"), (harness, "run_tasks"), (Engine, "evaluate")):
            patch.setattr(place, name, getattr(place, name))  # put back behind `eager_looks`
        for name in ("LEAST_STEPS", "MOST_STEPS"):
            patch.setattr(classifier, name, getattr(classifier, name))
        eager_looks()
        return {f"one {task}": runs_in(World(), folder / task, task, seen_in(f"one {task}")) for task in TASKS}


def test_looking_changes_no_loss_in_one_process(one):
    check_rows(one, {f"one {task}" for task in TASKS})


@pytest.mark.parametrize("size", WORLDS)
def test_looking_changes_no_loss_in_many_processes(one, size, tmp_path, monkeypatch):
    """And what is seen is what one process sees, whoever has more of the held-out data."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    write_images(tmp_path / "images")
    modes = WORLDS[size]
    rows = run_world(size, sweep, tmp_path, modes)[0]
    check_rows(rows, {f"{mode} {task}" for mode in modes for task in TASKS})
    for row, found in rows.items():
        for kind in seen_in(row):
            alone = one[f"one {row.partition(' ')[2]}"][f"{kind}, held out"]
            seen = [(step, pytest.approx(numbers, rel=1e-4, abs=1e-6)) for step, numbers in alone]
            assert found[f"{kind}, held out"] == seen, row
