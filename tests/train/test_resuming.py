"""Resuming with other fields: those that decide no loss may change and that is said; others are refused by name."""

import json
import re

import numpy as np
import pytest
import torch
from tests.commands.refusals import one_sentence

from siamesenorm.cli import main
from siamesenorm.errors import ConfigError
from siamesenorm.lab.compare.grid import fingerprint
from siamesenorm.train.branching import branch
from siamesenorm.train.config import RunConfig
from siamesenorm.train.fields import fields_of
from siamesenorm.train.folder import LOCK, RunFolder
from siamesenorm.train.loop import Loop, train
from siamesenorm.train.progress import RunProgress
from siamesenorm.train.provenance import hash_of
from siamesenorm.train.recipes import config_class, parse_config, resolve
from siamesenorm.train.resuming import changes, refused_change
from siamesenorm.train.schedule import lr_factor
from siamesenorm.train.trained import open_stored, open_trained

from .small_runs import losses, tiny

CHANGED = (
    "train.micro_batch_size=2",
    "train.activation_checkpointing=full",
    "train.compile=false",
    "data.prefetch=0",
    "optimizer.fused=false",
    "parallel.mode=fsdp",
    "divergence.policy=skip",
    "checkpoint.keep=5",
    "logging.every=3",
    "evaluation.sequences=7",
)


def events(folder, kind):
    found = map(json.loads, (folder / "events.jsonl").read_text().splitlines())
    return [event["message"] for event in found if event["event"] == kind]


def test_what_is_computed_differently_may_change_and_is_said(tmp_path):
    """The second half has other micro-batches, kernels and policies, and the losses of a run that changed nothing."""
    config = tiny("train.compile=null", "schedule.kind=constant")
    assert train(config, tmp_path / "one").state == "finished"
    half = tiny("train.compile=null", "schedule.kind=constant", "steps=6")
    assert train(half, tmp_path / "two").step == 6
    other = tiny("schedule.kind=constant", *CHANGED)
    assert refused_change(half, other, 6) is None
    assert train(other, tmp_path / "two").state == "finished"
    assert losses(tmp_path / "two") == pytest.approx(losses(tmp_path / "one"), rel=1e-5)
    said = events(tmp_path / "two", "changed")
    names = {override.partition("=")[0] for override in CHANGED} | {"train.steps"}
    assert {words.partition(" ")[0] for words in said} == names
    assert "train.micro_batch_size is 2 instead of null" in said
    assert RunFolder(tmp_path / "two").config() == other


@pytest.mark.parametrize(
    "override",
    ["lr=0.02", "batch_size=8", "model.dropout=0.1", "precision=bf16", "seed=1", "warmup=2", "sequence_length=8"],
)
def test_what_decides_the_loss_is_refused_by_name(override):
    field = next(changes(tiny(), tiny(override)).__iter__()).partition(" ")[0]
    assert field.endswith(override.partition("=")[0])
    assert (refused_change(tiny(), tiny(override), 0) or "").startswith(f"{field} is ")


def test_a_refused_change_leaves_the_run_as_it_was(tmp_path):
    train(tiny("steps=4", "schedule.kind=constant"), tmp_path)
    before = (tmp_path / "config.yaml").read_bytes()
    with pytest.raises(ConfigError, match=r"holds another run, whose optimizer\.lr is 0\.01 instead of 0\.5"):
        train(tiny("steps=8", "schedule.kind=constant", "lr=0.5", "micro_batch_size=1"), tmp_path)
    assert (tmp_path / "config.yaml").read_bytes() == before


@pytest.mark.parametrize(
    ("schedule", "done", "steps", "allowed"),
    [
        ("constant", 12, 100, True),
        ("constant", 12, 5, False),
        ("wsd", 10, 100, True),
        ("wsd", 11, 100, False),
        ("cosine", 3, 100, True),
        ("cosine", 4, 100, False),
        ("cosine", 12, 12, True),
    ],
)
def test_a_run_may_be_longer_where_learning_rates_so_far_stay_the_same(schedule, done, steps, allowed):
    """The rule agrees with the rates themselves, step by step."""
    here, there = tiny(f"schedule.kind={schedule}", f"steps={steps}"), tiny(f"schedule.kind={schedule}", "steps=12")
    assert (refused_change(there, here, done) is None) is allowed
    if steps >= done:
        rates = [[lr_factor(c.schedule, s, c.steps) for s in range(1, done + 1)] for c in (there, here)]
        assert (rates[0] == rates[1]) is allowed


def test_fingerprints_of_cells_know_what_decides_results():
    """Two micro-batches are one cell; two learning rates, two policies or two evaluations are two."""
    same = [tiny(), tiny("micro_batch_size=2", "train.compile=true", "parallel.mode=fsdp", "fused=false")]
    others = [tiny("lr=0.02"), tiny("divergence.policy=skip"), tiny("evaluation.sequences=3")]
    assert len({fingerprint(config) for config in same}) == 1
    assert len({fingerprint(config) for config in (same[0], *others)}) == 4


@pytest.mark.parametrize("task", ["language", "classification", "diffusion"])
def test_every_section_says_which_fields_decide_the_loss(task):
    """What is taken out of the decisive values is exactly what is marked."""
    config = resolve({"language": "lm-tiny", "classification": "deit-digits", "diffusion": "dit-digits"}[task])
    kept = set(paths(config.decisive()))
    for field in fields_of(config_class(task)):
        if field.section is None and not field.path.startswith("model."):
            assert (field.path in kept) is not field.how, field.path


def paths(values, prefix=""):
    for name, value in values.items():
        if isinstance(value, dict):
            yield from paths(value, f"{prefix}{name}.")
        yield prefix + name


@pytest.mark.parametrize(("parts", "size"), [(1, None), (4, "auto")])
def test_runs_of_earlier_versions_are_read(parts, size):
    """They said in how many parts a process computed its share."""
    values = tiny().as_dict()
    del values["train"]["micro_batch_size"]
    values["train"]["accumulation"] = parts
    config: RunConfig = parse_config(values)
    assert config.train.micro_batch_size == size
    assert config.decisive() == tiny().decisive()
    with pytest.raises(ConfigError, match=r"train\.accumulation = 0 is not allowed; it follows from"):
        parse_config({**values, "train": {**values["train"], "accumulation": 0}})


def steps_of(folder):
    return sorted(int(re.findall(r"\d+", path.name)[0]) for path in (folder / "checkpoints").glob("step-*"))


def test_a_run_goes_back_to_an_older_checkpoint_and_loses_nothing(tmp_path, monkeypatch):
    """Permanent checkpoints outlive the newest; metrics behind the step are kept aside, whenever it is killed."""
    config = tiny("checkpoint.every=3", "checkpoint.keep=1", "checkpoint.permanent=4")
    train(config, tmp_path)
    assert steps_of(tmp_path) == [4, 8, 12]
    before, lines = losses(tmp_path), (tmp_path / "metrics.jsonl").read_text().splitlines(keepends=True)
    with pytest.raises(ConfigError, match=r"--at: 3 is not allowed; .* it takes one of 4, 8, 12"):
        train(config, tmp_path, at=3)
    with monkeypatch.context() as patch:
        patch.setattr(RunProgress, "_go_on_from", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))  # killed here
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path, at=4)
    assert (tmp_path / "metrics.jsonl").read_text() == "".join(lines)
    assert train(config, tmp_path, at=4).state == "finished"
    assert losses(tmp_path) == before
    kept = [path.read_text() for path in (tmp_path / "aside").iterdir()]
    assert kept == ["".join(lines[4:])] * 2
    assert [message for message in events(tmp_path, "resumed") if "went back to step 4" in message]
    train(config, tmp_path, mode="restart")
    assert not (tmp_path / "aside").exists()


def test_what_is_killed_behind_a_return_goes_on_from_there(tmp_path, monkeypatch):
    config = tiny("checkpoint.permanent=4")
    train(config, tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "take_step", lambda loop: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            train(config, tmp_path, at=4)
    assert max(losses(tmp_path)) == 4
    assert train(config, tmp_path).state == "finished"
    assert max(losses(tmp_path)) == 12
    assert "resumed at step 4" in events(tmp_path, "resumed")


def test_a_finished_run_without_its_last_checkpoint_is_not_begun_again_by_asking_for_more_steps(tmp_path):
    """Cells of a grid and tidied runs have none: nothing of them is touched."""
    train(tiny("schedule.kind=constant", "steps=4"), tmp_path, keep_state=False)
    before = (tmp_path / "metrics.jsonl").read_bytes()
    with pytest.raises(
        ConfigError, match=r"train\.steps: 8 is not allowed .* finished at step 4 and has no checkpoint"
    ):
        train(tiny("schedule.kind=constant", "steps=8"), tmp_path)
    with pytest.raises(ConfigError, match=r"train\.steps is 4 instead of 3, and 4 steps are done"):
        train(tiny("schedule.kind=constant", "steps=3"), tmp_path)
    assert (tmp_path / "metrics.jsonl").read_bytes() == before


def test_weights_of_an_earlier_end_are_not_taken_for_those_of_a_run_that_went_on(tmp_path, monkeypatch):
    train(tiny("schedule.kind=constant", "steps=4"), tmp_path)
    first = open_trained(tmp_path)
    assert first.step == 4
    take_step = Loop.take_step

    def cut(self):
        if self.step == 6:
            raise RuntimeError("the power is gone")
        return take_step(self)

    monkeypatch.setattr(Loop, "take_step", cut)
    with pytest.raises(RuntimeError, match="the power is gone"):
        train(tiny("schedule.kind=constant", "steps=8", "checkpoint.every=2"), tmp_path)
    later, stored = open_trained(tmp_path), open_stored(tmp_path)
    assert later.step == stored.step == 6
    name, weight = next(iter(later.model.named_parameters()))
    assert not torch.equal(weight, first.model.get_parameter(name))
    assert torch.equal(weight, stored.weights.read(name))


def contents(folder):
    """Of all files but for those that keep others out."""
    return {path: path.read_bytes() for path in folder.rglob("*") if path.is_file() and path.name != LOCK}


def test_a_run_and_its_branches_go_on_with_no_other_data_and_are_not_measured_on_others_unsaid(
    tmp_path, capsys, caplog
):
    """A file of the same name with another text would train two halves on two texts under one name."""
    text, run = tmp_path / "text.txt", tmp_path / "run"
    text.write_text("".join(f"line {number} of some text, {number * 7919}\n" for number in range(3000)))
    made = [f"data.train={text}", "evaluation.every=6", "checkpoint.every=6", "schedule.kind=constant"]
    assert train(tiny(*made), run).state == "finished"
    branch(run, 6, 3, tmp_path / "branch")
    assert main(["evaluate", str(run)]) == 0
    before = capsys.readouterr().out
    assert "other data" not in caplog.text
    text.write_text(text.read_text().upper())
    there = contents(tmp_path)
    for asked in ([str(run), "--at", "6"], [str(tmp_path / "branch")]):
        heard = one_sentence(["train", *asked], capsys)
        assert f"data: {str(text)!r} is not what it was when this run began" in heard
    assert contents(tmp_path) == there
    assert main(["evaluate", str(run)]) == 0
    assert capsys.readouterr().out != before
    assert f"data {str(text)!r} is not what it was when the run was trained" in caplog.text
    assert train(tiny(*made), run, mode="restart").state == "finished"  # anew it may learn what it likes
    assert train(tiny(*made), run, at=6).state == "finished"


def test_a_run_inside_of_a_run_is_refused(tmp_path, capsys):
    """Neither `runs` nor `report` would look for it there."""
    run = tmp_path / "run"
    train(tiny("steps=1", "warmup=0"), run)
    before = contents(tmp_path)
    for inner in ("inner", "deep/er"):
        heard = one_sentence(["train", "lm-tiny", "--run", str(run / inner)], capsys)
        assert f"run: {str(run / inner)!r} is not allowed; it lies in the run {str(run)!r}" in heard
    assert contents(tmp_path) == before
    whole = (run / "config.yaml").read_text()
    for number, recipe in enumerate(("mine: 1\n", whole)):  # a file of the user's own is no run
        (tmp_path / "config.yaml").write_text(recipe)
        assert train(tiny("steps=1", "warmup=0"), tmp_path / f"beside{number}").state == "finished"


def test_what_is_only_trained_on_is_not_read_to_evaluate(tmp_path, capsys, caplog, monkeypatch):
    """Training data may be terabytes; held-out data are looked at, by `inspect` as by `evaluate`."""
    read = []
    monkeypatch.setattr("siamesenorm.train.provenance.hash_of", lambda name: read.append(name) or hash_of(name))
    held_out, array = tmp_path / "held_out.txt", tmp_path / "tokens.npy"
    held_out.write_text("".join(f"line {number}\n" for number in range(900)))
    np.save(array, np.arange(4096, dtype=np.uint16) % 250)
    made = [f"data.train={array}", f"data.validation=[{held_out}]", "evaluation.every=6"]
    assert train(tiny(*made), tmp_path / "run").state == "finished"
    assert str(array) in read
    for command in ("evaluate", "inspect"):
        read.clear()
        caplog.clear()
        held_out.write_text(held_out.read_text().upper() + ".")
        assert main([command, str(tmp_path / "run")]) == 0
        assert str(held_out) in read
        assert str(array) not in read
        assert f"data {str(held_out)!r} is not what it was when the run was trained" in caplog.text
    capsys.readouterr()
