"""Whole runs: the same configuration gives the same losses, interrupted or not; nothing is recorded twice or lost."""

import json
import os
import random
import signal

import pytest
import torch

from failing_files import contents, failing
from siamesenorm.errors import ConfigError
from siamesenorm.train import loop as loop_module
from siamesenorm.train.checkpoint.folder import CheckpointFolder
from siamesenorm.train.display import Display
from siamesenorm.train.folder import METRICS, OWN, STATUS, WEIGHTS, MetricsFile, RunFolder, read_metrics
from siamesenorm.train.loop import Loop, train
from siamesenorm.train.progress import RunProgress
from siamesenorm.train.recipes import resolve

from .small_runs import evaluations, losses, tiny, train_until, weights

REGULAR = ("checkpoint.every=3", "evaluation.every=4", "evaluation.sequences=4")


def same_weights(one, other) -> bool:
    first, second = weights(one), weights(other)
    return first.keys() == second.keys() and all(torch.equal(first[name], second[name]) for name in first)


def test_a_run_leaves_its_folder_complete(tmp_path):
    result = train(tiny(*REGULAR), tmp_path / "run")
    assert (result.state, result.step) == ("finished", 12)
    assert list(losses(tmp_path / "run")) == list(range(1, 13))
    assert list(evaluations(tmp_path / "run")) == [4, 8, 12]
    assert result.evaluation == evaluations(tmp_path / "run")[12]
    status = json.loads((tmp_path / "run" / STATUS).read_text())
    assert (status["state"], status["step"], status["steps"]) == ("finished", 12, 12)
    names = {path.name for path in (tmp_path / "run").iterdir()}
    assert names >= {"config.yaml", "metrics.jsonl", "events.jsonl", "checkpoints", "weights.safetensors"}
    assert "tensorboard" not in names


def test_the_saved_configuration_gives_the_same_losses_and_weights(tmp_path):
    train(tiny(*REGULAR, "seed=3"), tmp_path / "one")
    train(resolve(str(tmp_path / "one" / "config.yaml")), tmp_path / "two")
    assert losses(tmp_path / "one") == losses(tmp_path / "two")
    assert evaluations(tmp_path / "one") == evaluations(tmp_path / "two")
    assert same_weights(tmp_path / "one", tmp_path / "two")


def test_another_seed_gives_other_losses(tmp_path):
    train(tiny("steps=3"), tmp_path / "one")
    train(tiny("steps=3", "seed=1"), tmp_path / "two")
    assert losses(tmp_path / "one") != losses(tmp_path / "two")


@pytest.mark.parametrize(
    "extra",
    [
        (),
        ("model.dropout=0.2", "ema=0.8", "micro_batch_size=2"),
        ("precision=fp16",),
        ("topology=x0:prores=5", "parametrization=completep", "base_width=8", "base_depth=1"),
        ("topology=siamese:y=attnres",),
    ],
)
def test_a_killed_run_ends_with_bitwise_the_same_weights(tmp_path, extra):
    config = tiny(*REGULAR, *extra)
    train(config, tmp_path / "whole")
    for step in sorted(random.Random(f"{extra}").sample(range(1, 13), 3)):
        train_until(step, config, tmp_path / "killed")
    result = train(config, tmp_path / "killed")
    assert result.state == "finished"
    assert same_weights(tmp_path / "whole", tmp_path / "killed")
    assert losses(tmp_path / "whole") == losses(tmp_path / "killed")
    assert evaluations(tmp_path / "whole") == evaluations(tmp_path / "killed")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT, signal.SIGHUP])
def test_a_signal_saves_and_the_same_command_goes_on(tmp_path, monkeypatch, number):
    config = tiny()
    train(config, tmp_path / "whole")
    plain = Loop.take_step

    def take_step(self):
        verdict = plain(self)
        if self.step == 5:
            os.kill(os.getpid(), number)
        return verdict

    before = signal.getsignal(number)
    with monkeypatch.context() as patch:
        patch.setattr(Loop, "take_step", take_step)
        result = train(config, tmp_path / "run")
    assert (result.state, result.step, result.signal) == ("interrupted", 5, number)
    assert signal.getsignal(number) == before
    assert "the same command goes on" in result.message
    assert RunFolder(tmp_path / "run").status()["state"] == "interrupted"
    assert train(config, tmp_path / "run").state == "finished"
    assert same_weights(tmp_path / "whole", tmp_path / "run")
    assert losses(tmp_path / "whole") == losses(tmp_path / "run")


def test_a_signal_that_is_ignored_stays_so(tmp_path, monkeypatch):
    """As under nohup."""
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        plain = Loop.take_step
        monkeypatch.setattr(Loop, "take_step", lambda self: (os.kill(os.getpid(), signal.SIGHUP), plain(self))[1])
        assert train(tiny("steps=3"), tmp_path / "run").state == "finished"
    finally:
        signal.signal(signal.SIGHUP, before)


def test_a_finished_run_is_not_run_again(tmp_path, monkeypatch):
    first = train(tiny("steps=2", "warmup=0"), tmp_path / "run")
    monkeypatch.setattr(loop_module, "Loop", None)
    again = train(tiny("steps=2", "warmup=0"), tmp_path / "run")
    assert (again.state, again.loss) == ("finished", first.loss)
    assert "already" in again.message


def test_restart_begins_anew(tmp_path):
    train(tiny("steps=3"), tmp_path / "run")
    (tmp_path / "run" / "notes.txt").write_text("mine")
    written = {path.name for path in (tmp_path / "run").iterdir()}
    assert written == {*OWN, "config.yaml", "notes.txt", ".lock"} & written  # all that it wrote, it would remove
    result = train(tiny("steps=4", "lr=1e-3"), tmp_path / "run", mode="restart")
    assert (result.state, result.step) == ("finished", 4)
    assert list(losses(tmp_path / "run")) == [1, 2, 3, 4]
    assert resolve(str(tmp_path / "run" / "config.yaml")).optimizer.lr == 1e-3
    assert (tmp_path / "run" / "notes.txt").read_text() == "mine"


def test_a_folder_keeps_to_one_run(tmp_path):
    train(tiny("steps=3"), tmp_path / "run")
    before = {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}
    with pytest.raises(ConfigError, match=r"optimizer.lr is 0.01 instead of 0.5; give another --run"):
        train(tiny("steps=3", "lr=0.5"), tmp_path / "run")
    with pytest.raises(ConfigError, match="holds no run to resume"):
        train(tiny(), tmp_path / "none", mode="resume")
    assert not (tmp_path / "none").exists()
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "file").write_text("x")
    for mode in ("auto", "restart"):
        with pytest.raises(ConfigError, match="holds other files"):
            train(tiny(), tmp_path / "other", mode=mode)
    with pytest.raises(ConfigError, match="is a file"):
        train(tiny(), tmp_path / "other" / "file")
    assert before == {path: path.stat().st_mtime_ns for path in (tmp_path / "run").rglob("*")}


def test_what_decides_no_loss_may_change_on_resume(tmp_path):
    train_until(8, tiny(*REGULAR), tmp_path / "run")
    result = train(tiny(*REGULAR, "checkpoint.every=5", "logging.every=2"), tmp_path / "run", mode="resume")
    assert result.state == "finished"
    assert resolve(str(tmp_path / "run" / "config.yaml")).checkpoint.every == 5


def test_two_processes_cannot_train_in_one_folder(tmp_path):
    """The second is refused at the start, before it opens its data."""
    run = RunFolder(tmp_path / "run")
    with run.locked(), pytest.raises(ConfigError, match="another process is training"):
        train(tiny("steps=1", "warmup=0", f"data.train={tmp_path}/not-there"), tmp_path / "run")
    with run.locked(), pytest.raises(ConfigError, match="another process is training"):
        train(tiny("steps=1", "warmup=0"), tmp_path / "run")
    assert train(tiny("steps=1", "warmup=0"), tmp_path / "run").state == "finished"


def test_averaged_weights_are_evaluated_and_exported(tmp_path):
    train(tiny("evaluation.every=12", "evaluation.sequences=4"), tmp_path / "plain")
    train(tiny("evaluation.every=12", "evaluation.sequences=4", "ema=0.5"), tmp_path / "averaged")
    assert losses(tmp_path / "plain") == losses(tmp_path / "averaged")
    assert not same_weights(tmp_path / "plain", tmp_path / "averaged")
    assert evaluations(tmp_path / "plain") != evaluations(tmp_path / "averaged")


def test_a_small_model_learns(tmp_path):
    config = tiny("steps=150", "lr=2e-2", "train.batch_size=16", "dim=32", "evaluation.every=150", "sequences=32")
    result = train(config, tmp_path / "run")
    found = losses(tmp_path / "run")
    assert found[1] == pytest.approx(6.05, abs=0.25)  # ln 258, and half a nat for the spread of a head of std 1/sqrt(d)
    assert sum(found[step] for step in range(141, 151)) / 10 < 2.75  # the unigram level is 3.1
    assert result.evaluation["perplexity"] < 20


@pytest.mark.usefixtures("elsewhere")
def test_a_failing_checkpoint_is_reported_and_the_run_goes_on(tmp_path, monkeypatch):
    from siamesenorm.train.checkpoint.store import CheckpointStore

    plain = CheckpointStore._write_shards

    def fail_first(self, partial, tensors):
        if "00000003" in partial.name:
            raise OSError(28, "No space left on device", str(partial))
        plain(self, partial, tensors)

    monkeypatch.setattr(CheckpointStore, "_write_shards", fail_first)
    result = train(tiny("checkpoint.every=3"), tmp_path / "run")
    assert result.state == "finished"
    events = (tmp_path / "run" / "events.jsonl").read_text()
    assert "checkpoint of step 3 was not saved: no space left on device" in events


@pytest.fixture
def elsewhere(tmp_path, monkeypatch):
    """A current folder that a save gone wrong may have, rather than the one with the source."""
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")


class FillsTheDisk(Display):
    """At a step, no file can be made or grow any more."""

    def __init__(self, disk, at):
        self.disk, self.at = disk, at

    def step(self, record, unit, rate):
        self.disk.full = record["step"] >= self.at


@pytest.mark.usefixtures("elsewhere")
def test_a_full_disk_ends_the_run_and_the_status_says_so(tmp_path):
    config = tiny("checkpoint.every=3", "logging.every=1")
    with failing(tmp_path) as disk, pytest.raises(OSError, match="No space left on device"):
        train(config, tmp_path / "run", display=FillsTheDisk(disk, 7))
    status = RunFolder(tmp_path / "run").status()
    assert (status["state"], status["step"]) == ("failed", 8)
    assert "No space left on device" in status["message"]
    assert train(config, tmp_path / "run").state == "finished"  # there is room again
    assert train(tiny("checkpoint.every=3"), tmp_path / "other").state == "finished"
    assert losses(tmp_path / "run") == losses(tmp_path / "other")
    assert (tmp_path / "run" / WEIGHTS).read_bytes() == (tmp_path / "other" / WEIGHTS).read_bytes()


@pytest.mark.usefixtures("elsewhere")
def test_the_status_tells_of_a_save_that_failed(tmp_path, monkeypatch):
    plain, seen = CheckpointFolder.begin, []

    def begin(self, step):
        if step == 6:
            raise OSError(28, "No space left on device", str(self.path))
        return plain(self, step)

    class Watching(Display):
        def step(self, record, unit, rate):
            seen.append(RunFolder(tmp_path / "run").status().get("problem"))

    monkeypatch.setattr(CheckpointFolder, "begin", begin)
    assert (
        train(tiny("checkpoint.every=3", "logging.every=1"), tmp_path / "run", display=Watching()).state == "finished"
    )
    assert seen[-1] is not None
    assert seen[-1].startswith("checkpoint of step 6 was not saved: no space left on device")
    assert "problem" not in RunFolder(tmp_path / "run").status()  # the save after it succeeded


@pytest.mark.parametrize("mode", ["auto", "restart"])
def test_folders_in_the_place_of_files_and_files_in_that_of_folders_are_named(tmp_path, mode):
    train(tiny("steps=3"), tmp_path / "run")
    for name in ("weights.safetensors", "metrics.jsonl", "checkpoints", "status.json", "config.yaml"):
        path, aside = tmp_path / "run" / name, tmp_path / "aside"
        os.rename(path, aside)
        if name == "checkpoints":
            path.symlink_to("nowhere")
        else:
            path.mkdir()
            (path / "mine.txt").write_text("mine")
        with pytest.raises(ConfigError, match=rf"{name}' is not allowed; a run has a|holds other files"):
            train(tiny("steps=3"), tmp_path / "run", mode=mode)
        if name == "checkpoints":
            path.unlink()
        else:
            assert (path / "mine.txt").read_text() == "mine"
            (path / "mine.txt").unlink()
            path.rmdir()
        os.rename(aside, path)
    assert train(tiny("steps=3"), tmp_path / "run", mode=mode).state == "finished"


def test_restart_removes_only_what_a_run_wrote(tmp_path):
    """Somebody's project that also has a config.yaml, a note among the checkpoints, checkpoints on another disk."""
    project = tmp_path / "project"
    (project / "checkpoints").mkdir(parents=True)
    (project / "checkpoints" / "best.pt").write_text("mine")
    for text in ("model: resnet\n", "task: language\nbase: lm-tiny\n"):
        (project / "config.yaml").write_text(text)
        before = contents(project)
        with pytest.raises(ConfigError, match=r"holds other files; its config\.yaml is not that of a run"):
            train(tiny("steps=3"), project, mode="restart")
        assert contents(project) == before
    run = tmp_path / "run"
    train(tiny("steps=3"), run)
    for name in ("checkpoints/notes.txt", "checkpoints/step-00000003/notes.txt"):
        (run / name).write_text("mine")
        before = contents(run)
        with pytest.raises(ConfigError, match=r"notes\.txt' was not made by this program; move it away"):
            train(tiny("steps=3"), run, mode="restart")
        assert contents(run) == before
        (run / name).unlink()
    os.rename(run / "checkpoints", tmp_path / "large disk")
    (run / "checkpoints").symlink_to(tmp_path / "large disk")
    assert train(tiny("steps=4"), run, mode="restart").state == "finished"
    assert (run / "checkpoints").is_symlink()
    assert sorted(path.name for path in (tmp_path / "large disk").iterdir()) == ["run.json", "step-00000004"]


# metrics.jsonl ---------------------------------------------------------------------------------------


def test_metrics_drop_what_lies_behind_and_what_was_cut_off(tmp_path):
    path = tmp_path / METRICS
    lines = [json.dumps({"step": step, "loss": step / 2}) for step in range(1, 9)]
    path.write_text("\n".join(lines) + '\n{"step": 9, "lo')
    metrics = MetricsFile(path)
    metrics.rewind(5)
    metrics.write({"step": 6, "loss": float("nan")})
    metrics.close()
    assert [record["step"] for record in read_metrics(tmp_path)] == [1, 2, 3, 4, 5, 6]
    assert read_metrics(tmp_path)[-1] == {"step": 6, "loss": None}  # JSON has no NaN


def test_tensorboard_has_the_scalars(tmp_path):
    accumulator = pytest.importorskip("tensorboard.backend.event_processing.event_accumulator")
    train(tiny("steps=4", "tensorboard=true", "logging.every=2"), tmp_path / "run")
    events = accumulator.EventAccumulator(str(tmp_path / "run" / "tensorboard"))
    events.Reload()
    points = [(event.step, event.value) for event in events.Scalars("train/loss")]
    found = losses(tmp_path / "run")
    assert points == [(2, pytest.approx(found[2])), (4, pytest.approx(found[4]))]


@pytest.mark.parametrize("name", ["wandb", "trackio"])
def test_a_tracker_that_is_not_installed_is_named_with_its_extra(tmp_path, monkeypatch, name):
    import importlib.util

    monkeypatch.setattr(importlib.util, "find_spec", lambda module: None)
    with pytest.raises(ConfigError, match=rf"logging.{name}: needs the package '{name}'.*siamesenorm\[{name}\]"):
        train(tiny(f"{name}=project"), tmp_path / "run")
    assert not (tmp_path / "run").exists()


def test_a_signal_does_not_claim_a_save_that_failed(tmp_path, monkeypatch):
    plain = Loop.take_step

    def take_step(self):
        verdict = plain(self)
        if self.step == 5:
            os.kill(os.getpid(), signal.SIGTERM)
        return verdict

    monkeypatch.setattr(Loop, "take_step", take_step)
    monkeypatch.setattr(RunProgress, "save", lambda self, wait=False: False)
    assert "was not saved" in train(tiny(), tmp_path / "run").message
