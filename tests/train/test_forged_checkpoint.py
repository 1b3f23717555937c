"""Checkpoints whose files were changed together with their checksums: one sentence, wherever they are read."""

import json
import shutil

import pytest
from tests.commands.damage import agreeing

from siamesenorm.errors import ConfigError
from siamesenorm.train.folder import CHECKPOINTS
from siamesenorm.train.loop import train
from siamesenorm.train.progress import check_progress
from siamesenorm.train.trained import open_trained

from .small_runs import tiny

CONFIG = tiny("steps=2", "warmup=0", "checkpoint.every=1", "train.ema=0.9")


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    """A run that has its checkpoints and no weights yet."""
    folder = tmp_path_factory.mktemp("forged") / "run"
    train(CONFIG, folder)
    for name in ("weights.safetensors", "status.json"):
        (folder / name).unlink()
    return folder


@pytest.fixture
def newest(run, tmp_path):
    """The newest checkpoint of a copy."""
    shutil.copytree(run, tmp_path / "run")
    return tmp_path / "run" / CHECKPOINTS / "step-00000002"


def refused(file):
    """Forge the checksum of a file of a checkpoint too; whoever reads the run refuses it."""
    assert agreeing(file)
    run = file.parents[2]
    for read in (lambda: open_trained(run), lambda: train(CONFIG, run)):
        with pytest.raises(ConfigError, match=f"^(?!run: ).*({file.parent.name}|in the checkpoint).*$"):
            read()


def tensors_of(index):
    return next(iter(index["tensors"].values()))


FORGERIES = {
    "no tensors": lambda index: index.clear(),
    "tensors that are a list": lambda index: index.update(tensors=[1]),
    "a size of terabytes": lambda index: tensors_of(index).update(size=[2**50]),
    "a negative size": lambda index: tensors_of(index).update(size=[-1]),
    "a size beyond all numbers": lambda index: tensors_of(index).update(size=[10**30]),
    "an unknown dtype": lambda index: tensors_of(index).update(dtype="nonsense"),
    "a function for a dtype": lambda index: tensors_of(index).update(dtype="load"),
    "chunks of text": lambda index: tensors_of(index).update(chunks="x"),
    "a chunk elsewhere": lambda index: tensors_of(index)["chunks"][0].update(file="../../../etc/passwd"),
    "a chunk behind the end": lambda index: tensors_of(index)["chunks"][0].update(start=2**60),
    "a chunk before the start": lambda index: tensors_of(index)["chunks"][0].update(start=-5),
    "a chunk of another length": lambda index: tensors_of(index)["chunks"][0].update(length=3),
    "a chunk that is null": lambda index: tensors_of(index)["chunks"][0].update(start=None),
}


@pytest.mark.parametrize("forgery", FORGERIES)
def test_an_index_that_lies_is_one_sentence(forgery, newest):
    index = json.loads((newest / "index.json").read_text())
    FORGERIES[forgery](index)
    (newest / "index.json").write_text(json.dumps(index))
    refused(newest / "index.json")


@pytest.mark.parametrize("content", [b"", b"noise", b"\x80\x04\x95" * 100, b"PK\x03\x04" + b"\0" * 200])
def test_a_shard_of_something_else_is_one_sentence(content, newest):
    (shard,) = newest.glob("*.distcp")
    shard.write_bytes(content)
    refused(shard)


@pytest.mark.parametrize(
    "changes",
    [
        {"step": -1}, {"step": "x"}, {"step": None}, {"step": 10**30}, {"sample": -1}, {"sample": []}, {"sample": 1.5},
        {"loss": "x"}, {"seconds": {}}, {"evaluation": 3}, {"evaluation": {"loss": []}}, {"monitor": -1},
        {"monitor": {"losses": "x"}}, {"monitor": {"spikes": -1}}, {"precision": []}, {"precision": {"scale": "x"}},
    ],
    ids=str,
)  # fmt: skip
def test_progress_that_lies_is_one_sentence(changes, newest):
    progress = json.loads((newest / "progress.json").read_text())
    check_progress(progress, newest)
    check_progress({**progress, "loss": float("nan"), "evaluation": {"perplexity": float("inf")}}, newest)
    with pytest.raises(ConfigError, match=f"is damaged at {next(iter(changes))}"):
        check_progress({**progress, **changes}, newest)


def test_a_run_does_not_go_on_from_progress_that_lies(newest):
    progress = json.loads((newest / "progress.json").read_text())
    (newest / "progress.json").write_text(json.dumps({**progress, "monitor": -1}))
    assert agreeing(newest / "progress.json")
    with pytest.raises(ConfigError, match="is damaged at monitor"):
        train(CONFIG, newest.parents[1])
