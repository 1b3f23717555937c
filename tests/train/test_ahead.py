"""Running ahead of the device, as on GPUs: unread steps wait for nothing, and everything ends as where each is read."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from siamesenorm.train import engine
from siamesenorm.train.distributed import World
from siamesenorm.train.folder import read_metrics
from siamesenorm.train.loop import Loop, train
from siamesenorm.train.recipes import resolve
from waiting import never_read

from .small_runs import tiny, train_until, weights
from .test_divergence import poison
from .worlds import run_world

TASKS = {
    "language": ["lm-tiny", "data.train=python-docs", "sequence_length=16", "document_masking=true"],
    "muon": ["lm-tiny", "data.train=python-docs", "sequence_length=16", "optimizer.kind=muon"],
    "classification": ["deit-digits"],
    "diffusion": ["dit-digits"],
}
RUN = [
    "dim=16", "blocks=2", "heads=2", "ffn_dim=32", "train.batch_size=4", "warmup=1", "steps=8", "peak_flops=1e12",
    "checkpoint.every=5", "evaluation.every=null", "tensorboard=false", "logging.every=3", "train.ema=0.9",
]  # fmt: skip
plain_runs_ahead = engine.runs_ahead


def run_ahead() -> None:
    """As if the device were a GPU."""
    engine.runs_ahead = lambda config, device: plain_runs_ahead(config, torch.device("cuda"))


@pytest.fixture
def ahead(monkeypatch):
    monkeypatch.setattr(engine, "runs_ahead", engine.runs_ahead)  # put back behind the test
    return run_ahead


def never_wait(monkeypatch) -> list[int]:
    """Every step that nobody looks at fails where it waits; the list of these steps."""
    plain, steps = Loop.take_step, []

    def take_step(self):
        step = self.step + 1
        if any(every and (step % every == 0 or step == self.config.steps) for every in (3, 5)):
            return plain(self)
        steps.append(step)
        with never_read(self.engine.model):
            return plain(self)

    monkeypatch.setattr(Loop, "take_step", take_step)
    return steps


def story(folder: Path) -> list[dict[str, Any]]:
    """All that a run says of itself, but for the time it took."""
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    timed = ("seconds", "mfu", "time")
    return [{k: v for k, v in r.items() if k not in timed} for r in [*read_metrics(folder), *events]]


def assert_same(one: Path, other: Path) -> None:
    assert story(one) == story(other)
    first, second = weights(one), weights(other)
    assert first.keys() == second.keys()
    assert all(torch.equal(first[name], second[name]) for name in first)


@pytest.mark.parametrize("task", TASKS)
def test_steps_that_nobody_looks_at_wait_for_nothing(tmp_path, monkeypatch, ahead, task):
    config = resolve(TASKS[task][0], [*TASKS[task][1:], *RUN])
    train(config, tmp_path / "read")
    ahead()
    steps = never_wait(monkeypatch)
    train(config, tmp_path / "ahead")
    assert steps == [1, 2, 4, 7]
    assert_same(tmp_path / "read", tmp_path / "ahead")


def test_a_step_that_is_read_is_noticed(monkeypatch, tmp_path):
    never_wait(monkeypatch)
    with pytest.raises(AssertionError, match=r"waits for the device|is read"):
        train(tiny("logging.every=3"), tmp_path / "run")


@pytest.mark.parametrize(("policy", "loss"), [("stop", "nan"), ("rollback", "nan"), ("rollback", "99"), ("skip", "99")])
def test_policies_end_as_where_every_step_is_read(tmp_path, monkeypatch, ahead, policy, loss):
    """Two bad steps in the middle of what is read together; notes name the same layers and samples."""
    poison(monkeypatch, {24, 28}, float(loss))
    config = tiny(f"policy={policy}", "checkpoint.every=5", "history=4", "spike_steps=2", "logging.every=5")
    results = [train(config, tmp_path / "read")]
    ahead()
    results.append(train(config, tmp_path / "ahead"))
    assert results[0].state == ("diverged" if policy == "stop" else "finished")
    assert (results[0].state, results[0].step, results[0].loss) == (results[1].state, results[1].step, results[1].loss)
    assert results[0].message == results[1].message
    assert story(tmp_path / "read") == story(tmp_path / "ahead")
    if policy != "stop":
        assert_same(tmp_path / "read", tmp_path / "ahead")


def test_nothing_is_learnt_behind_a_step_that_is_no_number(tmp_path, monkeypatch, ahead):
    """The layer is found in the weights that the step began with, which steps behind it have left alone."""
    plain = engine.Engine.gradients

    def gradients(self, step):
        hook = self.model.blocks[1].attention.out.register_forward_hook(lambda m, i, out: out / (step != 7))
        try:
            return plain(self, step)
        finally:
            hook.remove()

    monkeypatch.setattr(engine.Engine, "gradients", gradients)
    ahead()
    result = train(tiny("logging.every=12"), tmp_path / "run")
    assert (result.state, result.step) == ("diverged", 6)
    (event,) = [e for e in story(tmp_path / "run") if e.get("event") == "non_finite"]
    assert (event["step"], "(activation of blocks.1.attention)" in event["message"]) == (7, True)


def test_killed_runs_end_in_the_same_weights(tmp_path, ahead):
    config = tiny("checkpoint.every=4", "logging.every=5", "train.ema=0.9")
    train(config, tmp_path / "whole")
    ahead()
    for step in (3, 8, 12):
        train_until(step, config, tmp_path / "killed")
    train(config, tmp_path / "killed")
    records = [[r for r in story(tmp_path / name) if "loss" in r] for name in ("whole", "killed")]
    assert records[0] == records[1]
    assert all(torch.equal(weights(tmp_path / "whole")[n], t) for n, t in weights(tmp_path / "killed").items())


def both(world: World, folder: Path) -> None:
    config = tiny("logging.every=3", "document_masking=true", "micro_batch_size=2", "steps=5")
    train(config, folder / "read", world=world)
    run_ahead()
    train(config, folder / "ahead", world=world)


def test_two_processes(tmp_path):
    run_world(2, both, tmp_path, mode="fsdp")
    assert_same(tmp_path / "read", tmp_path / "ahead")
