"""Runs made elsewhere: a recorder for any loop, and what a report makes of it."""

import contextlib
import json
import math

import pytest
import torch
from torch import nn

import siamesenorm
from siamesenorm.errors import ConfigError
from siamesenorm.train.folder import read_metrics


def recorded(folder, topology="pre", seed=0, ends=1.0, steps=8, known=None, **more):
    with siamesenorm.record(folder, topology=topology, lr=1e-3, seed=seed, tokens=8192, steps=known, **more) as run:
        for step in range(steps):
            run.step(loss=3 - (3 - ends) * (step + 1) / steps, grad_norm=1.0)
        run.evaluate(loss=ends)
    return run


def status(folder):
    return json.loads((folder / "status.json").read_text())


def test_recorded_runs_are_compared_like_others(tmp_path):
    for seed, noise in enumerate((0.0, 0.01, -0.01)):
        recorded(tmp_path / f"pre-{seed}", "pre", seed, 1.5 + noise, data="python-docs")
        recorded(tmp_path / f"siamese-{seed}", "siamese", seed, 1.2 + noise, data="python-docs")
    found = siamesenorm.report(tmp_path)
    assert found.analysis.baseline == "pre"
    (against,) = found.analysis.best_lr
    assert against.difference.mean == pytest.approx(-0.3, abs=1e-6)
    assert "8,192 held-out tokens" in found.verdict
    (run, *_) = found.records.runs
    assert run.state == "finished"
    assert run.config.steps == 8  # which nobody had to say beforehand
    assert len(run.facts["data"]["python-docs"]) == 64
    assert run.facts["versions"]["torch"]


def test_settings_keep_runs_apart(tmp_path):
    recorded(tmp_path / "a", depth=6)
    recorded(tmp_path / "b", depth=12)
    assert siamesenorm.report(tmp_path).records.groups == ["depth=6", "depth=12"]


def test_a_loss_that_is_no_number_is_a_divergence(tmp_path):
    with siamesenorm.record(tmp_path / "run", topology="post", lr=1.0) as run:
        run.step(loss=3.0)
        run.step(loss=math.nan)
    assert status(run.folder)["state"] == "diverged"
    with siamesenorm.record(tmp_path / "other", topology="post", lr=1.0) as run:
        run.step(loss=3.0)
        run.diverged("gradients are gone")
    assert "gradients are gone" in status(run.folder)["message"]


def test_exceptions_leave_word_and_the_run_can_be_recorded_again(tmp_path):
    run = siamesenorm.record(tmp_path / "run", topology="pre", lr=1e-3)

    def loop():
        with run:
            for _ in range(4):
                run.step(loss=1.0)
            raise RuntimeError("out of luck")

    with pytest.raises(RuntimeError):
        loop()
    assert status(run.folder)["state"] == "failed"
    assert "out of luck" in status(run.folder)["message"]
    with siamesenorm.record(tmp_path / "run", topology="pre", lr=1e-3, resume_from=3) as run:
        run.step(loss=0.5)
    assert [(line["step"], line["loss"]) for line in read_metrics(run.folder)] == [(1, 1), (2, 1), (3, 1), (4, 0.5)]
    with (
        pytest.raises(ConfigError, match="holds a run that is finished"),
        siamesenorm.record(tmp_path / "run", topology="pre", lr=1e-3),
    ):
        pass
    recorded(tmp_path / "run", "siamese", restart=True)
    assert len(read_metrics(tmp_path / "run")) == 9


@pytest.mark.parametrize(("loss", "state"), [(1.0, "finished"), (float("nan"), "diverged")])
def test_a_run_of_which_all_steps_were_recorded_before_ends_as_its_last_loss_says(tmp_path, loss, state):
    """What failed behind the last step is done again; there is no step to record."""
    with contextlib.suppress(RuntimeError), siamesenorm.record(tmp_path / "run", topology="pre", lr=1e-3) as run:
        for _ in range(3):
            run.step(loss=loss)
        raise RuntimeError("the evaluation was out of memory")
    with siamesenorm.record(tmp_path / "run", topology="pre", lr=1e-3, resume_from=3) as run:
        run.evaluate(loss=0.9)
    assert status(run.folder)["state"] == state
    assert status(run.folder)["evaluation"] == {"loss": 0.9}


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"lr": -1.0}, "optimizer.lr: -1.0 is not allowed"),
        ({"seed": "a"}, "train.seed: 'a' is not allowed"),
        ({"samples": 3, "tokens": 4}, "one of the two"),
        ({"resume_from": 4}, "no step is recorded"),
    ],
)
def test_a_wrong_recording_is_one_sentence(tmp_path, more, words):
    with pytest.raises(ConfigError, match=words):
        siamesenorm.record(tmp_path / "run", **{"topology": "pre", "lr": 1e-3, **more}).start()
    assert not (tmp_path / "run").exists()
    run = siamesenorm.record(tmp_path / "run", topology="pre", lr=1e-3)
    with pytest.raises(ConfigError, match="inside of the with block"):
        run.step(loss=1.0)


def test_the_trainer_of_transformers_is_recorded(tmp_path):
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("accelerate")
    from siamesenorm.lab.trainer_callback import RecordingCallback

    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(2, 1)

        def forward(self, x, labels):
            return {"loss": (self.linear(x) - labels).square().mean()}

    items = [{"x": torch.ones(2), "labels": torch.ones(1)} for _ in range(8)]
    arguments = transformers.TrainingArguments(
        output_dir=str(tmp_path / "out"), max_steps=4, logging_steps=2, report_to=[], use_cpu=True, learning_rate=1e-2,
        save_strategy="no", disable_tqdm=True, seed=3,
    )  # fmt: skip
    callback = RecordingCallback(tmp_path / "run", topology="pre", samples=8)
    trainer = transformers.Trainer(Model(), arguments, train_dataset=items, eval_dataset=items, callbacks=[callback])
    trainer.train()
    trainer.evaluate()
    found = siamesenorm.report(tmp_path / "run", folder=tmp_path / "report")
    (run,) = found.records.runs
    assert (run.topology, run.lr, run.seed, run.state, run.step) == ("pre", 1e-2, 3, "finished", 4)
    assert [step for step, _ in run.curve] == [2, 4]
    assert run.evaluation["loss"] > 0


def test_a_run_that_ends_before_its_steps_is_not_finished(tmp_path):
    run = recorded(tmp_path / "short", steps=5, **{"known": 8})
    assert status(run.folder)["state"] == "interrupted"
    assert status(run.folder)["message"] == "ended at step 5 of steps = 8"
    recorded(tmp_path / "whole", seed=1, known=8)
    found = siamesenorm.report(tmp_path)
    assert found.records.unfinished == ("short",)
    run = siamesenorm.record(tmp_path / "long", topology="pre", lr=1e-3, steps=8).start()
    run.step(loss=1.0, at=8)
    with pytest.raises(ConfigError, match=r"at: 9 is not allowed; it takes a step up to steps = 8"):
        run.step(loss=1.0)
    run.end()
    assert status(run.folder)["state"] == "finished"
