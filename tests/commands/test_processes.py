"""Commands that use a trained model, by two processes: what one process gives, told by the first alone."""

import json
import os
import shutil

import numpy as np
import pytest

from siamesenorm.cli import main
from siamesenorm.tasks.fidelity import classifier
from siamesenorm.train.loop import train
from siamesenorm.train.recipes import resolve
from train.worlds import run_commands

TINY = ["dim=16", "blocks=1", "heads=2", "ffn_dim=16", "batch_size=8", "warmup=0", "steps=1", "peak_flops=1e12"]
COMMANDS = {
    "generate": ["generate", "language", "The ", "A", "", "--samples", "3", "--tokens", "5", "--batch-size", "2",
                 "--seed", "3"],
    "evaluate": ["evaluate", "language", "-o", "language.json"],
    "fsdp": ["evaluate", "language", "--parallel", "fsdp", "-o", "fsdp.json"],
    "tp": ["evaluate", "diffusion", "--parallel", "tp", "-o", "tp.json"],
    "classes": ["evaluate", "classes", "-o", "classes.json"],
    "text": ["evaluate", "language", "--text", "text.txt", "--batch-size", "2", "-o", "text.json"],
    "predict": ["predict", "classes", "images.npy", "--batch-size", "2", "--json"],
    "npz": ["sample", "diffusion", "--steps", "2", "--sampler", "ddim", "--per-class", "1", "--at-once", "3",
            "--individually", "samples.npz", "--filmstrip", "strip.png"],
    "folder": ["sample", "diffusion", "--steps", "2", "--classes", "0-3", "--per-class", "2", "--at-once", "3",
               "--individually", "pictures", "--out", "pictures.png", "--precision", "bf16"],
    "fid": ["fid", "samples.npz", "digits", "--cache", "cache", "--batch-size", "4", "--json"],
}  # fmt: skip
STEPS = 40
"""Of the classifier in whose features samples are compared."""
NOT_THE_SAME = {"command", "processes", "seconds", "run", "checkpoint"}
"""What a result file says of the call and not of the model."""


@pytest.fixture(scope="module")
def place(language_run, tmp_path_factory):
    """A folder with runs of every task, and what they are used on."""
    folder = tmp_path_factory.mktemp("processes")
    shutil.copytree(language_run, folder / "language")
    for name, recipe in (("classes", "deit-digits"), ("diffusion", "dit-digits")):
        quiet = ["evaluation.every=null", "tensorboard=false", *(["samples=0"] if name == "diffusion" else [])]
        train(resolve(recipe, [*TINY, *quiet]), folder / name)
    (folder / "text.txt").write_text("It was the best of times, it was the worst of times. " * 4)
    np.save(folder / "images.npy", np.random.default_rng(0).integers(0, 256, (5, 8, 8, 1), dtype=np.uint8))
    return folder


def files(folder):
    """Every file that a command has written, by name; of results, what is to be the same."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.suffix == ".json" and path.name != "samples.json":
            found[path.name] = without(json.loads(path.read_text()))
        elif path.is_file():
            found[path.relative_to(folder).as_posix()] = path.read_bytes()
    return found


def without(value):
    if not isinstance(value, dict):
        return value
    return {name: without(inner) for name, inner in value.items() if name not in NOT_THE_SAME}


def linked(place, folder):
    folder.mkdir()
    for path in place.iterdir():
        (folder / path.name).symlink_to(path)
    return folder


def written(place, folder):
    return files_of(folder, {path.name for path in place.iterdir()})


def files_of(folder, given):
    for name in given:
        (folder / name).unlink()
    return files(folder)


def test_two_processes_give_what_one_gives(place, tmp_path, monkeypatch, capsys):
    """Bit for bit; the sums of evaluation to the last digits of float64, models in parts to rounding."""
    monkeypatch.setattr(classifier, "LEAST_STEPS", STEPS)
    one, two = linked(place, tmp_path / "one"), linked(place, tmp_path / "two")
    (place / "cache").mkdir()
    for folder in (one, two):
        (folder / "cache").symlink_to(place / "cache")
    said = {}
    monkeypatch.chdir(one)
    for name, command in COMMANDS.items():
        assert main(command) == 0, name
        said[name] = capsys.readouterr().out
    for path in (place / "cache").glob("statistics-*"):
        os.unlink(path)  # made again by two, of shared batches
    first, second = run_commands(2, list(COMMANDS.values()), two, short_training)
    for (name, expected), (code, out, err), (other_code, nothing, _) in zip(said.items(), first, second, strict=True):
        assert (code, other_code) == (0, 0), (name, err)
        assert nothing == "", name
        assert out == expected, name
    alone, shared = written(place, one), written(place, two)
    assert shared.keys() == alone.keys()
    for name, content in alone.items():
        if isinstance(content, dict):
            rounding = 1e-5 if name in ("fsdp.json", "tp.json") else 1e-12
            assert flat(shared[name]) == pytest.approx(flat(content), rel=rounding), name
        else:
            assert shared[name] == content, name
    assert {"samples.npz", "strip.png", "pictures/0/000004.png", "language.json"} <= alone.keys()


def short_training():
    classifier.LEAST_STEPS = STEPS


def flat(value, name=""):
    """Numbers of nested dictionaries and lists by their place."""
    if isinstance(value, (dict, list)):
        parts = value.items() if isinstance(value, dict) else enumerate(value)
        return {place: number for key, inner in parts for place, number in flat(inner, f"{name}/{key}").items()}
    return {name: value if isinstance(value, (int, float)) else hash(value)}
