"""Classification in two processes: the same images, losses and confusion as in one."""

import pytest

from siamesenorm.train.folder import read_metrics
from siamesenorm.train.loop import train
from siamesenorm.train.recipes import resolve

from .worlds import run_world

SMALL = [
    "dim=16", "blocks=2", "heads=2", "ffn_dim=32", "batch_size=16", "steps=4", "warmup=1", "evaluation.every=4",
    "repeats=2", "tensorboard=false", "peak_flops=1e9", "parallel.device=cpu",
]  # fmt: skip


def run_in(world, config, folder):
    return train(config, folder, world=world).evaluation


@pytest.mark.parametrize("mode", ["ddp", "fsdp"])
def test_two_processes_train_a_classifier_as_one_does(tmp_path, mode):
    config = resolve("deit-digits", [*SMALL, f"parallel.mode={mode}"])
    one = train(config, tmp_path / "one")
    two = run_world(2, run_in, config, tmp_path / "two", mode=mode)
    assert two[0] == pytest.approx(one.evaluation, rel=1e-4)
    assert two[0] == two[1]
    losses = [
        [record["loss"] for record in read_metrics(tmp_path / name) if "loss" in record] for name in ("one", "two")
    ]
    assert losses[1] == pytest.approx(losses[0], rel=1e-5)
    assert (tmp_path / "one" / "confusion.csv").read_text() == (tmp_path / "two" / "confusion.csv").read_text()
