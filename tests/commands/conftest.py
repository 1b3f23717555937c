"""A run of language and one of diffusion that several commands are tried on."""

from pathlib import Path

import pytest

from siamesenorm.cli import main
from siamesenorm.train.loop import train
from siamesenorm.train.recipes import resolve
from train.small_runs import SMALL


@pytest.fixture(scope="session")
def language_run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("language") / "a run"
    changes = ["max_length=48", "topology=siamese:form=hybrid_pre"]
    assert main(["train", "lm-tiny", *SMALL, *changes, "--run", str(folder)]) == 0
    return folder


@pytest.fixture(scope="session")
def diffusion_run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("diffusion") / "run"
    small = ["dim=16", "blocks=2", "heads=2", "ffn_dim=32", "batch_size=8", "warmup=0", "steps=2", "peak_flops=1e12"]
    train(resolve("dit-digits", [*small, "evaluation.every=null", "tensorboard=false"]), folder)
    return folder
