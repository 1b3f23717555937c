"""Branches: the run that the decay would have been from the first step on; nothing is written where one is refused."""

import shutil

import pytest
import torch

from siamesenorm.cli import main
from siamesenorm.errors import ConfigError
from siamesenorm.train.branching import branch
from siamesenorm.train.folder import RunFolder, read_metrics
from siamesenorm.train.loop import train

from .small_runs import losses, tiny, weights

TRUNK = ["checkpoint.every=3", "checkpoint.keep=9", "train.ema=0.9", "optimizer.kind=muon"]


@pytest.fixture(scope="module")
def trunk(tmp_path_factory):
    folder = tmp_path_factory.mktemp("trunk") / "run"
    train(tiny(*TRUNK, "schedule.kind=constant"), folder)
    return folder


def test_a_branch_is_the_run_with_that_decay_from_the_first_step_on(trunk, tmp_path):
    place = branch(trunk, 6, 4, tmp_path / "branch")
    assert list(losses(place)) == list(range(1, 7))
    train(RunFolder(place).config(), place, mode="resume")
    train(tiny(*TRUNK, "schedule.kind=wsd", "steps=10", "decay=0.4"), tmp_path / "whole")
    assert losses(place) == losses(tmp_path / "whole")
    ours, theirs = weights(place), weights(tmp_path / "whole")
    assert all(torch.equal(ours[name], theirs[name]) for name in theirs)
    rates = [record["lr"] for record in read_metrics(place) if "loss" in record]
    peak = rates[5]
    assert rates[6:] == pytest.approx([peak * (1 - 0.9 * q / 4) for q in (1, 2, 3, 4)])


def test_several_branches_leave_the_trunk_as_it_was(trunk, tmp_path, capsys):
    before = {path: path.read_bytes() for path in trunk.rglob("*") if path.is_file()}
    copy = tmp_path / "run"
    shutil.copytree(trunk, copy)
    for at in (3, 9):
        assert main(["branch", str(copy), "--at", str(at)]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {"run", "run-3+1", "run-9+2"}  # a fifth of all steps
    assert f"siamesenorm train {tmp_path / 'run-9+2'}" in capsys.readouterr().out
    assert {path: path.read_bytes() for path in trunk.rglob("*") if path.is_file()} == before
    assert {path.relative_to(copy): path.read_bytes() for path in copy.rglob("*") if path.is_file()} == {
        path.relative_to(trunk): content for path, content in before.items()
    }


def damaged(folder):
    (shard, *_) = (folder / "checkpoints" / "step-00000006").glob("*.distcp")
    shard.write_bytes(shard.read_bytes()[:-1])


def edited(old, new):
    def edit(folder):
        config = folder / "config.yaml"
        assert old in config.read_text()
        config.write_text(config.read_text().replace(old, new))

    return edit


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (
            None,
            ["--at", "5"],
            "--at: 5 is not allowed; {run!r} has no sound checkpoint of that step; it takes one of 3",
        ),
        (damaged, ["--at", "6"], "it takes one of 3, 9, 12"),
        (edited("kind: constant", "kind: cosine"), ["--at", "6"], "schedule.kind = 'cosine' has no steady part"),
        (edited("kind: constant", "kind: wsd"), ["--at", "12"], "not at its peak there; it takes 3 to 10"),
        (edited("warmup: 3", "warmup: 4"), ["--at", "3"], "not at its peak there; it takes 4 to 12"),
        (None, ["--at", "6", "--out", "{run}"], "is there already; it takes a new folder"),
        (None, ["--at", "6", "--out", "{run}/checkpoints/inside"], "it lies in the run {run!r}, which stays as it is"),
        (None, ["--at", "0"], "--at"),
        (None, ["--at", "6", "--decay", "0"], "--decay"),
        (shutil.rmtree, ["--at", "6"], "is not a run"),
    ],
)
def test_bad_input_is_one_sentence_and_nothing_is_written(trunk, tmp_path, capsys, change, options, message):
    run = tmp_path / "run"
    shutil.copytree(trunk, run)
    if change is not None:
        change(run)
    before = set(tmp_path.rglob("*"))
    assert main(["branch", str(run), *(option.format(run=run) for option in options)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert message.format(run=str(run)) in err
    assert set(tmp_path.rglob("*")) == before


def test_a_decay_of_all_steps_needs_a_number(trunk, tmp_path):
    shutil.copytree(trunk, tmp_path / "run")
    edited("decay: 0.2", "decay: 1.0")(tmp_path / "run")
    with pytest.raises(ConfigError, match=r"--decay: is not given, and schedule\.decay = 1 leaves no step"):
        branch(tmp_path / "run", 6)
