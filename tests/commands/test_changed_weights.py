"""A run's figures are tied to its weights: one bit that is not as it was written is seen wherever they are read."""

import json
import shutil
from pathlib import Path

import pytest
from PIL import Image

from siamesenorm.cli import main
from siamesenorm.train.folder import STATUS, WEIGHTS
from siamesenorm.train.loop import train
from siamesenorm.train.recipes import resolve
from train.small_runs import tiny

from .refusals import one_sentence

IMAGES = [
    "dim=16", "blocks=1", "heads=2", "ffn_dim=16", "batch_size=8", "warmup=0", "steps=1", "evaluation.every=null",
    "tensorboard=false", "peak_flops=1e12",
]  # fmt: skip
READING = {
    "language": ["generate RUN x", "evaluate RUN", "inspect RUN", "train RUN"],
    "classification": ["predict RUN digit.png", "evaluate RUN", "inspect RUN", "train RUN", "train TAUGHT"],
    "diffusion": ["sample RUN", "evaluate RUN", "inspect RUN", "train RUN"],
}
TAUGHT = "deit-digits model.distilled=true loss.teacher=RUN"


@pytest.fixture(scope="module")
def runs(tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("runs")
    train(tiny("steps=1", "warmup=0"), folder / "language")
    for task, recipe in (("classification", "deit-digits"), ("diffusion", "dit-digits")):
        train(resolve(recipe, IMAGES), folder / task)
    return {task: folder / task for task in READING}


def changed(run: Path, target: Path) -> Path:
    """A copy of a run with one other bit in the last weight."""
    shutil.copytree(run, target)
    content = bytearray((target / WEIGHTS).read_bytes())
    content[-1] ^= 1
    (target / WEIGHTS).write_bytes(content)
    return target


@pytest.mark.parametrize(
    ("task", "command"),
    [(task, command) for task, reading in READING.items() for command in (*reading, "export RUN out --to safetensors")],
)
def test_no_command_reads_other_weights_than_were_written(runs, tmp_path, monkeypatch, capsys, task, command):
    monkeypatch.chdir(tmp_path)
    run = changed(runs[task], tmp_path / "run")
    Image.new("L", (8, 8)).save(tmp_path / "digit.png")
    before = sorted(tmp_path.rglob("*"))
    words = command.replace("TAUGHT", TAUGHT).replace("RUN", str(run)).split()
    assert f"{run / WEIGHTS} has another SHA-256 than when it was written" in one_sentence(words, capsys)
    assert sorted(tmp_path.rglob("*")) == before


def test_the_checksum_is_that_of_the_file(runs):
    from siamesenorm.data.atomic import sha256_of

    for run in runs.values():
        recorded = json.loads((run / STATUS).read_text())["weights"]
        assert recorded == {"size": (run / WEIGHTS).stat().st_size, "sha256": sha256_of(run / WEIGHTS)}


def test_a_run_without_a_checksum_is_used_and_that_is_said_once(runs, tmp_path, caplog):
    run = changed(runs["language"], tmp_path / "run")
    status = json.loads((run / STATUS).read_text())
    del status["weights"]
    (run / STATUS).write_text(json.dumps(status))
    for command in (["generate", str(run), "x", "--tokens", "2"], ["train", str(run)], ["generate", str(run), "y"]):
        assert main(command) == 0
    assert [record.getMessage() for record in caplog.records if "checksum" in record.getMessage()] == [
        f"{run}: carries no checksum of its weights, which are taken as they are"
    ]


@pytest.mark.parametrize("nonsense", [5, {}, {"size": "many", "sha256": "0"}, {"size": 1}])
def test_a_checksum_that_cannot_be_read_is_one_sentence(runs, tmp_path, capsys, nonsense):
    run = tmp_path / "run"
    shutil.copytree(runs["language"], run)
    status = {**json.loads((run / STATUS).read_text()), "weights": nonsense}
    (run / STATUS).write_text(json.dumps(status))
    assert "has no checksum" in one_sentence(["generate", str(run), "x"], capsys)


@pytest.mark.parametrize("content", [None, b"", b"{", b"[]", b"\xff\xfe", b'{"step": "many"}'], ids=str)
def test_weights_without_their_status_are_refused_unless_somebody_vouches_for_them(runs, tmp_path, capsys, content):
    run = changed(runs["language"], tmp_path / "run")
    (run / STATUS).unlink()
    if content is not None:
        (run / STATUS).write_bytes(content)
    command = ["generate", str(run), "x", "--tokens", "1"]
    assert f"'{run / STATUS}', which has the checksum of {WEIGHTS}, cannot be read" in one_sentence(command, capsys)
    (run / STATUS).write_text("{}")
    assert main(command) == 0


def test_a_finished_run_whose_weights_were_removed_stays_finished(runs, tmp_path, capsys):
    run = tmp_path / "run"
    shutil.copytree(runs["language"], run)
    (run / WEIGHTS).unlink()
    assert main(["train", str(run)]) == 0
    assert "finished already" in capsys.readouterr().out
