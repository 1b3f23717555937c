"""Weights & Biases and trackio: what a run hands to them, through modules that only write down how they are called."""

import json
import math
import sys

import pytest

from siamesenorm.train.folder import read_metrics
from siamesenorm.train.loop import train
from siamesenorm.train.trackers import open_trackers

from .small_runs import tiny

RECORDER = """
import json, os
CALLS = os.environ["CALLS"]

def write(kind, *args, **kwargs):
    with open(CALLS, "a") as file:
        file.write(json.dumps([kind, args, kwargs]) + "\\n")

class Run:
    def __init__(self, id): self.id = id
    def log(self, values, step): write("log", values, step=step)
    def finish(self): write("finish")

def init(**kwargs):
    write("init", **kwargs)
    return Run(kwargs.get("id") or "new")

def log(values, step): write("log", values, step=step)
def finish(): write("finish")
"""


@pytest.fixture(params=["wandb", "trackio"])
def tracker(request, tmp_path, monkeypatch):
    """The name of a tracker whose module is the recorder, and a function that reads its calls."""
    modules, calls = tmp_path / "modules", tmp_path / "calls.jsonl"
    modules.mkdir()
    (modules / f"{request.param}.py").write_text(RECORDER)
    monkeypatch.syspath_prepend(str(modules))
    monkeypatch.setenv("CALLS", str(calls))
    monkeypatch.delitem(sys.modules, request.param, raising=False)
    yield request.param, lambda: [json.loads(line) for line in calls.read_text().splitlines()]
    sys.modules.pop(request.param, None)


def test_a_run_reports_what_its_metrics_say(tracker, tmp_path):
    name, calls = tracker
    config = tiny(
        "steps=5", "warmup=1", "logging.every=2", "evaluation.every=5", "evaluation.sequences=4", f"{name}=mine"
    )
    assert train(config, tmp_path / "my run").state == "finished"
    (_, _, opened), *logged, last = calls()
    assert (opened["project"], opened["name"]) == ("mine", "my run")
    assert opened["config"] == config.as_dict()
    assert last[0] == "finish"
    metrics = read_metrics(tmp_path / "my run")
    losses = {record["step"]: record["loss"] for record in metrics if "loss" in record}
    reported = {kwargs["step"]: values for _, (values,), kwargs in logged if "train/loss" in values}
    assert {step: values["train/loss"] for step, values in reported.items()} == {n: losses[n] for n in (2, 4, 5)}
    assert set(reported[2]) == {f"train/{field}" for field in metrics[0] if field != "step"}
    (evaluation,) = [values for _, (values,), _ in logged if "evaluation/loss" in values]
    assert evaluation["evaluation/perplexity"] == metrics[-1]["evaluation"]["perplexity"]


def test_only_numbers_are_reported(tracker, tmp_path):
    name, calls = tracker
    config = tiny(f"{name}=mine")
    (opened,) = open_trackers(config.logging, config, tmp_path, 0)
    opened.log(3, {"loss": 1.5, "worse": math.nan, "skipped": "overflow", "yes": True})
    opened.close()
    assert calls()[1:] == [["log", [{"loss": 1.5}], {"step": 3}], ["finish", [], {}]]


@pytest.mark.parametrize("tracker", ["wandb"], indirect=True)
def test_a_run_that_goes_on_is_the_same_wandb_run(tracker, tmp_path):
    _, calls = tracker
    config = tiny("wandb=mine")
    for _ in range(2):
        open_trackers(config.logging, config, tmp_path, 0)
    assert [call[2]["id"] for call in calls()] == [None, "new"]


@pytest.mark.parametrize("tracker", ["trackio"], indirect=True)
def test_a_trackio_run_goes_on_only_behind_its_first_step(tracker, tmp_path):
    _, calls = tracker
    config = tiny("trackio=mine")
    for step in (0, 7):
        open_trackers(config.logging, config, tmp_path, step)
    assert [call[2]["resume"] for call in calls()] == ["never", "allow"]
