"""Runs that begin with weights of another: of a run, a folder or a file, checked and read once."""

import shutil

import pytest
import torch

from siamesenorm.errors import ConfigError
from siamesenorm.train.branching import branch
from siamesenorm.train.facts import read_facts
from siamesenorm.train.folder import RunFolder
from siamesenorm.train.init_from import resized
from siamesenorm.train.loop import train
from siamesenorm.train.recipes import resolve
from siamesenorm.train.trained import open_stored, save_stored

from .small_runs import SMALL, losses, tiny, train_until, weights
from .worlds import run_world

STILL = ("lr=1e-30", "steps=1", "warmup=0")
"""Steps that change no weight."""


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("source") / "run"
    train(tiny("steps=2", "warmup=0", "topology=pre"), folder)
    return folder


def test_weights_of_a_run_or_a_file_are_those_it_begins_with(source, tmp_path):
    file = tmp_path / "weights.safetensors"
    save_stored(open_stored(source), file)
    for number, place in enumerate((source, file)):
        folder = tmp_path / str(number)
        train(tiny(*STILL, "topology=pre", "seed=5", "ema=0.5", f"init_from={place}"), folder)
        expected = weights(source)
        assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(folder).items())
        assert RunFolder(folder).config().train.init_from == str(place)
        assert f"began with the weights of {place}" in (folder / "events.jsonl").read_text()


def test_a_run_that_goes_on_does_not_look_for_them_again(source, tmp_path):
    here = shutil.copytree(source, tmp_path / "source")
    config = tiny("steps=4", "checkpoint.every=2", "topology=pre", "logging.every=1", f"init_from={here}")
    left_alone = tmp_path / "left_alone"
    train(config, left_alone)
    train_until(4, config, tmp_path / "run")
    shutil.rmtree(here)
    assert train(config, tmp_path / "run").state == "finished"
    assert losses(tmp_path / "run") == losses(left_alone)
    with pytest.raises(ConfigError, match="is not there"):
        train(config, tmp_path / "run", mode="restart")


@pytest.mark.parametrize(
    ("changes", "sentence"),
    [
        (["dim=32"], "model.dim: 32 does not fit train.init_from, whose weights take 16"),
        (["topology=siamese"], "model.topology: 'siamese' does not fit"),
        (["model.vocab_size=300"], "train.init_vocab=resize changes it"),
        (["norm_eps=0.1"], "model.norm_eps: 0.1 does not fit"),
    ],
)
def test_what_does_not_fit_is_named_and_nothing_is_written(source, tmp_path, changes, sentence):
    with pytest.raises(ConfigError) as refused:
        train(tiny("topology=pre", *changes, f"init_from={source}"), tmp_path / "run")
    assert sentence in str(refused.value)
    assert not (tmp_path / "run").exists()


def test_the_vocabulary_is_resized_on_request(source, tmp_path):
    first = weights(source)["embedding.weight"]
    rows = len(first) + 7
    changes = ("topology=pre", f"model.vocab_size={rows}", "init_vocab=resize", f"init_from={source}")
    train(tiny(*STILL, *changes), tmp_path / "run")
    found = weights(tmp_path / "run")["embedding.weight"]
    assert torch.equal(found[: len(first)], first)
    torch.testing.assert_close(found[len(first) :], first.mean(0, keepdim=True).expand(7, -1))
    assert torch.equal(resized(first, 10), first[:10])


@pytest.mark.parametrize("mode", ["fsdp", "tp"])
def test_every_process_begins_with_its_part_of_them(source, tmp_path, mode):
    config = tiny(*STILL, "topology=pre", "seed=5", f"parallel.mode={mode}", "device=cpu", f"init_from={source}")
    assert run_world(2, run_in, config, tmp_path / "run", mode=mode) == ["finished", "finished"]
    expected = weights(source)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in weights(tmp_path / "run").items())


def run_in(world, config, folder):
    return train(config, folder, world=world).state


def test_the_model_is_taken_from_there_but_for_overrides(source, tmp_path):
    config = tiny("steps=1", "warmup=0")
    values = [change for change in SMALL if not change.startswith(("dim", "blocks", "heads", "ffn_dim"))]
    taken = resolve("lm-tiny", [*values, "warmup=0", "model.dropout=0.1", "init_model=true", f"init_from={source}"])
    assert taken.model == RunFolder(source).config().model.model_copy(update={"dropout": 0.1})
    assert taken.model != config.model
    assert train(taken.model_copy(update={"train": config.train}), tmp_path / "run").state == "finished"
    assert resolve(str(tmp_path / "run")).model == taken.model
    with pytest.raises(ConfigError, match="takes false unless"):
        tiny("init_model=true")


def start_of(folder):
    return read_facts(folder).get("init_from_sha256")


def test_the_weights_begun_with_are_recorded_by_their_content(source, tmp_path):
    """A run, its exported file and the run trained anew have one path or several, and content of their own."""
    file = tmp_path / "weights.safetensors"
    save_stored(open_stored(source), file)
    places = {"run": source, "file": file}
    for name, place in places.items():
        train(tiny(*STILL, "topology=pre", f"init_from={place}", "schedule.kind=constant"), tmp_path / name)
    (start,) = {start_of(tmp_path / name) for name in places}
    assert len(start) == 64
    branch(tmp_path / "run", 1, 1, tmp_path / "branch")
    assert start_of(tmp_path / "branch") == start
    again = shutil.copytree(source, tmp_path / "again")
    train(tiny("steps=2", "warmup=0", "topology=pre", "seed=9"), again, mode="restart")
    config = tiny(*STILL, "topology=pre", f"init_from={again}")
    train(config, tmp_path / "other")
    assert start_of(tmp_path / "other") not in (start, None)
    shutil.rmtree(again)
    shutil.copytree(source, again)
    train(config, tmp_path / "other", mode="restart")
    assert start_of(tmp_path / "other") == start
    train(tiny(*STILL, "topology=pre"), tmp_path / "other", mode="restart")
    assert start_of(tmp_path / "other") is None


def test_a_diffusion_that_goes_on_with_another_process_says_so(tmp_path):
    small = ["dim=16", "blocks=1", "heads=2", "steps=1", "warmup=0", "train.batch_size=4", "evaluation.every=null"]
    first = resolve("dit-digits", [*small, "diffusion.schedule=linear"])
    train(first, tmp_path / "first")
    save_stored(open_stored(tmp_path / "first"), tmp_path / "file.safetensors")
    for number, place in enumerate((tmp_path / "first", tmp_path / "file.safetensors")):
        folder = tmp_path / str(number)
        train(resolve("dit-digits", [*small, "diffusion.schedule=cosine", f"init_from={place}"]), folder)
        events = (folder / "events.jsonl").read_text()
        assert "were trained with diffusion.schedule = linear; this run goes on with cosine" in events
    train(resolve("dit-digits", [*small, "diffusion.schedule=linear", f"init_from={place}"]), tmp_path / "same")
    assert "were trained with" not in (tmp_path / "same" / "events.jsonl").read_text()
