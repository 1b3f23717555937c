"""Runs from folders: each once wherever it was made, unfinished ones named, what differs found by itself."""

import json

import pytest

from siamesenorm.errors import ConfigError
from siamesenorm.lab.report.records import find_runs, read_records, read_run, thinned
from siamesenorm.lab.report.sentences import notes
from siamesenorm.train.folder import RunFolder
from siamesenorm.train.recipes import resolve
from siamesenorm.train.yaml import write_yaml

from .folders import FACTS, write_run


def test_runs_are_found_at_any_depth_and_once(tmp_path):
    one, other = write_run(tmp_path / "a" / "cells"), write_run(tmp_path / "b", "siamese")
    (one / "checkpoints").mkdir()
    assert find_runs([tmp_path, one]) == [one, other]


def test_a_grid_gives_its_order(tmp_path):
    folders = [write_run(tmp_path / "cells", name) for name in ("siamese", "pre", "post")]
    (tmp_path / "grid.json").write_text(json.dumps({"cells": [folder.name for folder in folders]}))
    assert read_records(find_runs([tmp_path])).topologies == ["siamese", "pre", "post"]


def test_settings_are_the_fields_that_differ(tmp_path):
    for warmup in (0, 4):
        for topology in ("pre", "siamese"):
            write_run(tmp_path, topology, overrides=(f"warmup={warmup}", f"logging.every={warmup + 1}"))
    records = read_records(find_runs([tmp_path]))
    assert sorted(records.groups) == ["warmup=0", "warmup=4"]


@pytest.mark.parametrize(
    "axis", [("divergence.history=10", "divergence.history=20"), ("evaluation.sequences=8", "evaluation.sequences=16")]
)
def test_what_decides_a_result_outside_training_keeps_runs_apart(tmp_path, axis):
    for setting in axis:
        write_run(tmp_path, overrides=(setting, f"evaluation.every={len(setting)}"))
    records = read_records(find_runs([tmp_path]))
    assert not records.duplicates
    assert sorted(records.groups) == sorted(setting.partition(".")[2] for setting in axis)


@pytest.mark.parametrize(
    ("recipe", "axis"),
    [
        ("dit-digits", ("diffusion.schedule=cosine", "diffusion.schedule=linear")),
        ("deit-digits", ("loss.smoothing=0.0", "loss.smoothing=0.1")),
    ],
)
def test_a_tasks_own_sections_keep_runs_apart(tmp_path, recipe, axis):
    for number, setting in enumerate(axis):
        config = resolve(recipe, ["steps=400", setting])
        folder = tmp_path / str(number)
        folder.mkdir()
        (folder / "config.yaml").write_text(write_yaml(config.as_dict()))
        (folder / "status.json").write_text(json.dumps({"state": "finished", "step": 400, "evaluation": {"loss": 2.0}}))
    assert len(read_records(find_runs([tmp_path])).runs) == 2
    with pytest.raises(ConfigError, match=rf"whose {axis[0].partition('=')[0]} is"):
        RunFolder(tmp_path / "0").check(resolve(recipe, ["steps=400", axis[1]]), "auto")


def test_what_follows_from_another_field_is_not_said(tmp_path):
    for blocks, dim in ((4, 96), (12, 64)):
        write_run(tmp_path, overrides=(f"blocks={blocks}", f"dim={dim}", f"ffn_dim={3 * dim}"))
    assert sorted(read_records(find_runs([tmp_path])).groups) == ["blocks=12", "blocks=4"]


def test_runs_that_agree_have_no_setting(tmp_path):
    write_run(tmp_path, "pre", 1e-3, 0)
    write_run(tmp_path, "siamese", 1e-2, 1)
    assert read_records(find_runs([tmp_path])).groups == [""]


def test_a_run_of_two_machines_counts_once(tmp_path):
    write_run(tmp_path / "here", seed=0, loss=2.0)
    write_run(tmp_path / "there", seed=0, loss=2.25)
    write_run(tmp_path / "there", seed=1, loss=2.5)
    records = read_records(find_runs([tmp_path / "here", tmp_path / "there"]))
    assert [(run.seed, run.score("loss")) for run in records.runs] == [(0, 2.0), (1, 2.5)]
    ((_, difference),) = records.duplicates
    assert difference == pytest.approx(0.25)


def test_data_count_by_content_not_by_path(tmp_path):
    for name, digest in (("one", "aa"), ("two", "aa"), ("three", "bb")):
        facts = {**FACTS, "data": {f"/{name}/corpus": digest}}
        write_run(tmp_path / name, overrides=(f"data.train=[/{name}/corpus]",), facts=facts)
    records = read_records(find_runs([tmp_path]))
    assert len(records.runs) == 2
    assert len(records.duplicates) == 1


def test_grids_that_differ_in_data_name_every_difference(tmp_path):
    for name, digest, dim in (("one", "aa", 64), ("two", "bb", 96)):
        facts = {**FACTS, "data": {f"/{name}/corpus": digest * 32}}
        for topology in ("pre", "siamese"):
            overrides = (f"data.train=[/{name}/corpus]", f"model.dim={dim}", f"sequence_length={dim // 2}")
            write_run(tmp_path / name, topology, overrides=overrides, facts=facts)
    records = read_records(find_runs([tmp_path]))
    assert records.groups == [
        "train=corpus@aaaaaaaa sequence_length=32",
        "train=corpus@bbbbbbbb sequence_length=48",
    ]
    assert dict(records.differences) == {
        "data.train": ("corpus@aaaaaaaa", "corpus@bbbbbbbb"),
        "data.sequence_length": ("32", "48"),
        "model.dim": ("64", "96"),
    }
    (told,) = notes(records)
    assert "data.train (corpus@aaaaaaaa, corpus@bbbbbbbb), data.sequence_length (32, 48), model.dim (64, 96)" in told


def test_the_same_data_under_two_names_are_one_setting(tmp_path):
    for name, seed in (("one", 0), ("two", 1)):
        facts = {**FACTS, "data": {f"/{name}/corpus": "ab" * 32}}
        write_run(tmp_path / name, seed=seed, overrides=(f"data.train=[/{name}/corpus]",), facts=facts)
    records = read_records(find_runs([tmp_path]))
    assert records.groups == [""]
    assert notes(records) == []


def test_fields_that_labels_leave_out_are_named_in_a_note(tmp_path):
    for blocks, dim in ((12, 64), (4, 96)):
        write_run(tmp_path, overrides=(f"blocks={blocks}", f"dim={dim}", f"ffn_dim={3 * dim}"), name=f"of {dim}")
    (told,) = notes(read_records(find_runs([tmp_path])))
    assert "model.blocks (12, 4), model.dim (64, 96), model.ffn_dim (192, 288)" in told
    for warmup in (0, 4):
        write_run(tmp_path / "other", overrides=(f"warmup={warmup}",))
    assert notes(read_records(find_runs([tmp_path / "other"]))) == []  # their labels say it


def test_unfinished_runs_are_left_out_and_named(tmp_path):
    write_run(tmp_path, seed=0)
    left = write_run(tmp_path, seed=1, state="interrupted")
    records = read_records(find_runs([tmp_path]))
    assert len(records.runs) == 1
    assert records.unfinished == (left.name,)


def test_a_finished_run_on_the_plateau_is_stuck(tmp_path):
    # 3.2 is what frequencies alone give; the last quarter learns nothing.
    flat = write_run(tmp_path, seed=0, loss=3.15, losses=[3.2] * 40)
    assert read_run(flat).state == "stuck"
    assert read_run(flat).score("loss") is None
    slow = write_run(tmp_path, seed=1, loss=3.15, losses=[6 - 0.07 * step for step in range(40)])
    assert read_run(slow).state == "finished"  # still learning, only slowly
    good = write_run(tmp_path, seed=2, loss=2.0, losses=[2.0] * 40)
    assert read_run(good).state == "finished"


def test_a_run_of_the_trainer_without_cell_json_is_taken(tmp_path):
    folder = write_run(tmp_path)
    (folder / "cell.json").unlink()
    assert read_records([folder]).runs[0].score("loss") == 2.0


@pytest.mark.parametrize("broken", ["status.json", "metrics.jsonl", "cell.json"])
def test_damaged_files_do_not_stop_a_report(tmp_path, broken):
    folder, other = write_run(tmp_path, seed=0), write_run(tmp_path, seed=1)
    (folder / broken).write_text('{"step": nonsense')
    assert other.name in {run.name for run in read_records([folder, other]).runs}


def test_a_damaged_configuration_is_one_sentence(tmp_path):
    folder = write_run(tmp_path)
    (folder / "config.yaml").write_text("task: [")
    with pytest.raises(ConfigError, match="not YAML"):
        read_records([folder])


@pytest.mark.parametrize("what", ["nothing", "empty"])
def test_no_runs_is_one_sentence(tmp_path, what):
    (tmp_path / "empty").mkdir()
    with pytest.raises(ConfigError, match=r"is not a folder|holds no run"):
        find_runs([tmp_path / what])


def test_only_unfinished_runs_are_no_report(tmp_path):
    with pytest.raises(ConfigError, match="none of them is finished"):
        read_records([write_run(tmp_path, state="running")])


def test_a_thinned_curve_keeps_means_and_its_last_step():
    points = [(step, float(step)) for step in range(1, 1001)]
    few = thinned(points, 100)
    assert len(few) == 100
    assert few[0] == (10, 5.5)
    assert few[-1][0] == 1000
    assert thinned(points[:7], 100) == points[:7]


def test_runs_of_other_first_weights_under_one_name_are_kept_apart(tmp_path):
    for name, digest, seed in (("one", "aa", 0), ("two", "bb", 0), ("three", "aa", 1)):
        facts = {**FACTS, "init_from_sha256": digest * 32}
        place = "/there/run" if name != "three" else "/elsewhere/copy"
        write_run(tmp_path / name, seed=seed, overrides=(f"init_from={place}",), facts=facts)
    records = read_records(find_runs([tmp_path]))
    assert len(records.runs) == 3
    assert sorted(records.groups) == ["init_from=run@aaaaaaaa", "init_from=run@bbbbbbbb"]
    assert {run.seed: records.setting(run) for run in records.runs if run.folder.parent.name != "two"} == dict.fromkeys(
        (0, 1), "init_from=run@aaaaaaaa"
    )


def test_evaluations_before_the_end_are_named(tmp_path):
    for seed, step in ((0, 20), (1, 40)):
        folder = write_run(tmp_path, seed=seed)
        with open(folder / "metrics.jsonl", "a") as file:
            file.write(json.dumps({"step": step, "evaluation": {"loss": 2.0}}) + "\n")
    (told,) = notes(read_records(find_runs([tmp_path])))
    assert told.startswith("1 runs were last evaluated before their end: ")
    assert told.endswith("(at 20 of 40)")
