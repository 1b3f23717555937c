"""Runs go on from checkpoints of versions that named a block's links after their number in the stack."""

from __future__ import annotations

import re

import pytest
import torch

from siamesenorm.models.stack import current_name
from siamesenorm.train.checkpoint import store as module
from siamesenorm.train.checkpoint.manifest import CheckpointError
from siamesenorm.train.checkpoint.state import Restoring, flatten
from siamesenorm.train.loop import train
from siamesenorm.train.recipes import resolve

from .small_runs import Killed, kill_at, losses, weights
from .tiny import TinyRun, tiny_model


def old_name(name: str) -> str:
    return re.sub(r"blocks\.(\d+)\.links\.(\d)\.", lambda m: f"residual.links.{2 * int(m[1]) + int(m[2])}.", name)


def write_old_names(monkeypatch) -> None:
    monkeypatch.setattr(module, "flatten", lambda state: {old_name(name): t for name, t in flatten(state).items()})


@pytest.mark.parametrize("recipe", ["lm-tiny", "deit-digits", "dit-digits"])
def test_a_run_goes_on_to_the_same_weights(tmp_path, monkeypatch, recipe):
    sizes = ["dim=16", "blocks=2", "heads=2", "ffn_dim=32", "train.batch_size=4", "warmup=1", "evaluation.every=null"]
    rest = ["tensorboard=false", "peak_flops=1e12", "steps=6", "checkpoint.every=3", "train.ema=0.9"]
    config = resolve(recipe, [*sizes, *rest, *(["data.train=python-docs"] if recipe == "lm-tiny" else [])])
    train(config, tmp_path / "whole")
    with monkeypatch.context() as patch:
        write_old_names(patch)
        kill_at(patch, 5)
        with pytest.raises(Killed):
            train(config, tmp_path / "old")
    index = (tmp_path / "old" / "checkpoints" / "step-00000003" / "index.json").read_text()
    assert "residual.links.3." in index
    assert ".links.1." not in index.replace("residual.links.1.", "")
    train(config, tmp_path / "old")
    assert losses(tmp_path / "whole") == losses(tmp_path / "old")
    for name, tensor in weights(tmp_path / "whole").items():
        assert torch.equal(tensor, weights(tmp_path / "old")[name])


def test_a_tensor_under_both_names_is_refused():
    run = TinyRun(tiny_model())
    run.steps(1)
    sizes = {name: tensor.shape for name, tensor in flatten(run.state).items()}
    new = next(name for name in sizes if "links.0" in name)
    for both in ({**sizes, old_name(new): sizes[new]}, {old_name(new): sizes[new], **sizes}):
        with pytest.raises(CheckpointError, match=r"has .*links\.0.* twice, under an old name and the present one"):
            Restoring(run.state, both)


@pytest.mark.parametrize(
    "name", ["blocks.0.links.1.x.norm.weight", "residual.links.x.y", "my_residual.links.0.gain", ""]
)
def test_other_names_stay(name):
    assert current_name(name) == name


def test_numbers_without_end_are_no_links():
    name = f"residual.links.{'9' * 5000}.gain"
    assert current_name(name) == name
