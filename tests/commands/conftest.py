"""A run of language that several commands are tried on."""

from pathlib import Path

import pytest

from siamesenorm.cli import main
from train.small_runs import SMALL


@pytest.fixture(scope="session")
def language_run(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("language") / "a run"
    changes = ["max_length=48", "topology=siamese:form=hybrid_pre"]
    assert main(["train", "lm-tiny", *SMALL, *changes, "--run", str(folder)]) == 0
    return folder
