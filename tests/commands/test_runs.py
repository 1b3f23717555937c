"""Before and after a run: what it would take, and the list of those that are there."""

import json

import pytest

import siamesenorm
from siamesenorm.cli import main

SMALL = ["model.dim=16", "model.blocks=1", "model.heads=2", "model.ffn_dim=16", "sequence_length=16", "batch_size=2"]


def test_a_dry_run_says_time_and_memory_and_writes_nothing(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["train", "lm-tiny", *SMALL, "data.train=arithmetic", "steps=20", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "20 steps" in said
    assert "GiB of memory at least" in said
    assert "instead of the recipe's 30, as there are 20 steps" in said
    command = ["compare", "lm-tiny", *SMALL, "data.train=arithmetic", "steps=20", "--topologies", "pre,siamese"]
    assert main([*command, "--seeds", "0,1", "--jobs", "2", "-o", "here", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "4 cells; 2 at a time that is about" in said
    assert "Nothing was written." in said
    assert list(tmp_path.iterdir()) == []


def test_runs_are_listed_as_they_stand(tmp_path, capsys):
    with siamesenorm.record(tmp_path / "one", topology="siamese:form=plain", lr=2e-3, seed=3) as run:
        run.step(loss=1.5)
        run.evaluate(loss=1.25)
    (tmp_path / "two").mkdir()
    (tmp_path / "two" / "config.yaml").write_text("task: nothing\n")
    assert main(["runs", str(tmp_path), "--json"]) == 0
    one, two = json.loads(capsys.readouterr().out)
    assert (one["topology"], one["lr"], one["seed"]) == ("siamese:form=plain", 2e-3, 3)
    assert (one["state"], one["step"], one["loss"], one["held_out"]) == ("finished", 1, 1.5, 1.25)
    assert two["state"] == "unknown"
    assert "'nothing' is not known" in two["message"]
    assert main(["runs", str(tmp_path)]) == 0
    assert "1.2500" in capsys.readouterr().out


@pytest.mark.parametrize("folder", ["none", "."])
def test_a_folder_without_runs_is_one_sentence(folder, tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["runs", folder]) == 2
    assert "it takes runs, or folders that hold some" in capsys.readouterr().err


def test_a_recipe_stands_before_the_fields_once(tmp_path, capsys):
    assert main(["compare", "lm-tiny", "--recipe", "lm-tiny", "-o", str(tmp_path / "out")]) == 2
    assert "it takes one of" in capsys.readouterr().err
    assert main(["compare", "lm-tinny", "-o", str(tmp_path / "out")]) == 2
    assert "did you mean lm-tiny?" in capsys.readouterr().err
