"""Cells in processes: kept when done, resumed when not, one's end does not touch the others."""

import json
import os
import select
import signal
import subprocess
import sys
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import pytest

from siamesenorm.cli import main
from siamesenorm.errors import ConfigError, DataError
from siamesenorm.lab.compare.engines import local_engine
from siamesenorm.lab.compare.grid import Grid
from siamesenorm.lab.compare.preparation import OneComparison, Prepared, prepare_grid, prepare_text
from siamesenorm.lab.compare.runner import GridWatcher, LocalEngine, plan
from siamesenorm.lab.report.records import read_records
from siamesenorm.train.folder import read_metrics
from siamesenorm.train.loop import train
from siamesenorm.train.recipes import resolve

TINY = (
    "model.dim=16",
    "model.blocks=1",
    "model.heads=2",
    "model.ffn_dim=16",
    "data.sequence_length=16",
    "data.train=[arithmetic]",
    "train.batch_size=2",
    "train.steps=12",
    "schedule.warmup=2",
    "checkpoint.every=null",
    "evaluation.every=6",
    "evaluation.sequences=256",
    "evaluation.at_once=128",
    "logging.every=1",
)


def tiny_grid(*more: str, **wanted) -> Grid:
    return Grid("lm-tiny", **{"topologies": ("pre", "siamese"), "lrs": (1e-2,), "overrides": (*TINY, *more), **wanted})


def run(prepared: Prepared, jobs: int = 2) -> bool:
    return LocalEngine(jobs, threads=1).run(prepared.plan, prepared.provenance, GridWatcher())


@pytest.fixture(scope="module")
def finished(tmp_path_factory):
    out = tmp_path_factory.mktemp("finished")
    prepared = prepare_grid(tiny_grid(), out)
    assert run(prepared)
    return out, prepared


def test_cells_end_with_results_cost_and_provenance(finished):
    out, prepared = finished
    assert [progress.state for progress in prepared.plan] == ["finished", "finished"]
    for progress in prepared.plan:
        facts = json.loads((progress.folder / "cell.json").read_text())
        assert facts["processor_seconds"] > 0
        assert facts["threads"] == 1
        assert facts["versions"]["torch"]
        assert len(facts["data"]["arithmetic"]) == 64
        assert (progress.folder / "weights.safetensors").is_file()
        assert not (progress.folder / "checkpoints").exists()  # it will not go on
        assert progress.evaluation["loss"] > 0
        assert progress.losses
    assert {run.state for run in read_records(prepared.done).runs} <= {"finished", "stuck"}
    assert json.loads((out / "grid.json").read_text())["topologies"] == ["pre", "siamese"]


def test_done_cells_are_kept_and_new_ones_added(finished):
    out, prepared = finished
    before = {p.folder: (p.folder / "metrics.jsonl").stat().st_mtime_ns for p in prepared.plan}
    again = prepare_grid(tiny_grid(seeds=(0, 1), topologies=("pre",)), out)
    assert [progress.kept for progress in again.plan] == [True, False]
    assert run(again)
    assert [progress.state for progress in again.plan] == ["finished", "finished"]
    assert all((folder / "metrics.jsonl").stat().st_mtime_ns == moment for folder, moment in before.items())


def test_a_diverged_cell_is_a_result_and_the_grid_goes_on(tmp_path):
    # A spike of nothing at all above the median counts, so the second run ends at once.
    prepared = prepare_grid(
        tiny_grid("divergence.history=2", "divergence.spike_steps=1", topologies=("pre",), lrs=(1e-2, 100.0)), tmp_path
    )
    assert run(prepared, jobs=1)
    assert [progress.state for progress in prepared.plan] == ["finished", "diverged"]
    states = {run.lr: run.state for run in read_records(prepared.done).runs}
    assert states[100.0] == "diverged"


def test_a_cell_that_cannot_run_fails_alone(tmp_path):
    prepared = prepare_grid(tiny_grid(), tmp_path)
    prepared.plan[0].folder.mkdir(parents=True)
    (prepared.plan[0].folder / "stranger.txt").write_text("not a run")
    assert run(prepared)
    assert [progress.state for progress in prepared.plan] == ["failed", "finished"]
    assert "holds other files" in prepared.plan[0].message
    assert prepared.failed == [prepared.plan[0]]


def test_a_killed_process_fails_alone_and_is_resumed(tmp_path):
    grid = tiny_grid("train.steps=40", "evaluation.every=40", "checkpoint.every=5", topologies=("pre",), seeds=(0, 1))

    class Killer(GridWatcher):
        """Kills the first cell's process when it has taken some steps."""

        def changed(self, progress):
            if progress is prepared.plan[0] and progress.step >= 8 and progress.state == "running":
                import multiprocessing

                for child in multiprocessing.active_children():
                    if child.name == progress.cell.name:
                        os.kill(child.pid, signal.SIGKILL)

    prepared = prepare_grid(grid, tmp_path)
    LocalEngine(1, threads=1).run(prepared.plan, prepared.provenance, Killer())
    first, second = prepared.plan
    assert (first.state, second.state) == ("failed", "finished")
    again = prepare_grid(grid, tmp_path)
    assert [progress.kept for progress in again.plan] == [False, True]
    assert run(again)
    assert again.plan[0].state == "finished"
    assert [r["step"] for r in read_metrics(again.plan[0].folder) if "loss" in r] == list(range(1, 41))


PAUSED = """
import os, sys
from siamesenorm.__main__ import run
from siamesenorm.train import interruption, loop

heard, said = os.pipe()
take, take_step = interruption.Interruption._take, loop.Loop.take_step

def hear(self, number, frame):
    take(self, number, frame)
    os.write(said, b".")

def pause(self):
    verdict = take_step(self)
    if self.step == 20:
        with open(os.environ["PAUSED"], "wb") as paused:
            paused.write(b".")
        os.read(heard, 1)
    return verdict

interruption.Interruption._take, loop.Loop.take_step = hear, pause
if __name__ == "__main__":
    sys.exit(run())
"""
"""The command, whose cells say at step 20 that they are there, and wait for a signal."""


def arguments(out, *more: str) -> list[str]:
    fields = dict(item.split("=", 1) for item in (*TINY, *more))
    sets = [part for field, value in fields.items() for part in ("--set", f"{field}={value}")]
    grid = ["--recipe", "lm-tiny", "--topologies", "pre,siamese", "--lrs", "1e-2", "--seeds", "0"]
    return ["compare", *grid, "--jobs", "2", "--out", str(out), *sets]


def start(out, *more: str, program: Sequence[str] = ("-m", "siamesenorm"), **options) -> subprocess.Popen:
    command = [sys.executable, *program, *arguments(out, *more)]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    # A session of its own, as a terminal starts it: Ctrl-C then reaches all of its processes.
    return subprocess.Popen(command, start_new_session=True, **pipes, **options)


def test_ctrl_c_saves_and_the_same_command_goes_on(tmp_path, capsys):
    steps = ("train.steps=30", "evaluation.every=15")
    paused, program = tmp_path / "paused", tmp_path / "program.py"
    os.mkfifo(paused)
    program.write_text(PAUSED)
    waiting = os.open(paused, os.O_RDWR)  # so that nobody waits for the other to open it
    process = start(tmp_path / "stopped", *steps, program=[str(program)], env={**os.environ, "PAUSED": str(paused)})
    for _ in range(2):
        assert select.select([waiting], [], [], 300)[0], "no cell has come to step 20"
        os.read(waiting, 1)
    os.close(waiting)
    os.killpg(process.pid, signal.SIGINT)
    _, err = process.communicate(timeout=300)
    assert process.returncode == 130, err
    assert "the same command goes on from here" in err
    assert "Traceback" not in err
    states = [json.loads(p.read_text()) for p in (tmp_path / "stopped").glob("cells/*/status.json")]
    assert [(state["state"], state["step"]) for state in states] == [("interrupted", 20)] * 2
    assert main(arguments(tmp_path / "stopped", *steps)) == 0
    assert "report.html" in capsys.readouterr().out
    # A run that was never stopped has the same losses.
    whole = prepare_grid(tiny_grid(*steps, topologies=("pre",)), tmp_path / "whole")
    assert run(whole, jobs=1)
    (folder,) = whole.done
    resumed = tmp_path / "stopped" / "cells" / folder.name
    assert [r["loss"] for r in read_metrics(resumed) if "loss" in r] == [
        r["loss"] for r in read_metrics(folder) if "loss" in r
    ]


# Before anything is written ------------------------------------------------------------------------------


def test_data_that_changed_under_its_name_is_noticed(tmp_path):
    prepared = prepare_grid(tiny_grid(topologies=("pre",)), tmp_path)
    folder = prepared.plan[0].folder
    folder.mkdir(parents=True)
    (folder / "cell.json").write_text(json.dumps({"data": {"arithmetic": "0" * 64}}))
    (folder / "config.yaml").write_text(json.dumps(prepared.plan[0].cell.config.as_dict()))
    with pytest.raises(ConfigError, match="'arithmetic' is not what it was"):
        prepare_grid(tiny_grid(topologies=("pre",)), tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--topologies", "pre,nonsense"], "unknown name 'nonsense'"),
        (["--lrs", "fast"], "--lrs: 'fast'"),
        (["--preset", "nothing"], "--preset: 'nothing' is not known"),
        (["--set", "data.train=[nowhere]"], "'nowhere' is neither"),
        (["data.train=[nowhere]"], "'nowhere' is neither"),
        (["lm-tinny"], "did you mean lm-tiny?"),
        (["warmup=1", "lm-tiny"], "a recipe: --recipe"),
        (["--text", "nowhere.txt"], "'nowhere.txt' is neither a file nor a folder"),
        (["--text", "nowhere.txt", "--set", "blocks=0"], "model.blocks"),
        (["--text", __file__, "--recipe", "deit-digits"], "the recipe is one of classification, not of language"),
        (["--figures", "gif"], "--figures: 'gif'"),
        (["--baseline", "span"], "--baseline: 'span' is not compared; it takes one of pre, post, siamese"),
        (
            ["--metric", "los"],
            "--metric: 'los' is not known; it takes one of loss, perplexity, bits_per_byte, arithmetic",
        ),
        (["--metric", "arithmetic_error"], "--metric: 'arithmetic_error' is not known"),
        (
            ["--recipe", "dit-digits", "--metric", "accuracy"],
            "it takes one of loss, mse, vlb, frechet, sample_accuracy",
        ),
        (["--text", __file__, "--metric", "loss/x"], "'loss/x'"),
        (["--engine", "slurm"], "--engine: 'slurm' is not known; it takes one of local, ray"),
        (["--recipe", "nothing"], "unknown name 'nothing'"),
    ],
)
def test_bad_input_leaves_nothing_behind(arguments, message, tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert main(["compare", *arguments]) == 2
    error = capsys.readouterr().err
    assert message in error
    assert error.count("\n") == 1
    assert not list(tmp_path.iterdir())


def test_jobs_below_one_are_refused():
    with pytest.raises(ConfigError, match="--jobs: 0"):
        LocalEngine(0)


def test_a_users_text_is_prepared_once_and_partly_held_out(tmp_path, monkeypatch):
    text = tmp_path / "mine.txt"
    text.write_text("\n\n".join(f"Paragraph {number} says little." for number in range(1000)))  # 30 kB
    first = prepare_text(text, tmp_path / "out")
    index = json.loads((first / "index.json").read_text())
    assert index["splits"]["validation"]["tokens"] >= 4096
    assert index["splits"]["train"]["tokens"] > 3 * index["splits"]["validation"]["tokens"]
    moment = (first / "index.json").stat().st_mtime_ns
    assert prepare_text(text, tmp_path / "out") == first
    monkeypatch.chdir(tmp_path)
    assert prepare_text(Path("mine.txt"), Path("out")) == first  # wherever it is called from
    assert first.name.startswith("mine-")
    assert (first / "index.json").stat().st_mtime_ns == moment
    text.write_text(text.read_text() + "\n\nOne more.")
    assert prepare_text(text, tmp_path / "out") != first  # cells of the old text are not taken for new ones


@pytest.mark.parametrize("text", ["Just this.", "The same again. " * 5000])
def test_a_text_of_which_too_little_can_be_held_out_is_refused(tmp_path, text):
    (tmp_path / "short.txt").write_text(text)
    with pytest.raises(ConfigError, match=r"short.txt' [\d,]+ bytes can .* it takes 4,096, from 20,480 bytes or more"):
        prepare_text(tmp_path / "short.txt", tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_too_little_held_out_is_refused_before_training(tmp_path):
    with pytest.raises(ConfigError, match="evaluation: 64 tokens are too few to compare loss by; it takes 4,096"):
        prepare_grid(tiny_grid("evaluation.sequences=4"), tmp_path / "out")
    with pytest.raises(ConfigError, match="20 questions are too few to compare arithmetic by; it takes 100"):
        prepare_grid(tiny_grid("evaluation.arithmetic=20"), tmp_path / "out", "arithmetic")
    with pytest.raises(ConfigError, match="50 images are too few to compare accuracy by; it takes 100"):
        prepare_grid(Grid("deit-digits", ("pre",), (1e-2,), overrides=("images=50",)), tmp_path / "out", "accuracy")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("metric", "told"),
    [
        ("arithmetic", "it takes one of loss, perplexity"),
        ("bits_per_byte", "it takes one of loss, perplexity"),
        ("perplexity/arithmetic", "it takes one of loss, perplexity; did you mean perplexity\\?"),
    ],
)
def test_a_metric_that_no_run_would_have_is_refused_before_training(tmp_path, metric, told):
    with pytest.raises(ConfigError, match=rf"--metric: '{metric}' is not measured by these runs; {told}$"):
        prepare_grid(tiny_grid(), tmp_path / "out", metric)
    assert not (tmp_path / "out").exists()


def test_a_plan_writes_nothing(tmp_path):
    plan(tiny_grid().cells(), tmp_path / "out")
    assert not list(tmp_path.iterdir())


def test_a_second_comparison_in_a_folder_is_refused_at_the_start(finished, capsys):
    out, _ = finished
    before = {path: path.stat().st_mtime_ns for path in out.rglob("*")}
    with OneComparison(out) as one:
        one.take()
        assert main(["compare", "--recipe", "lm-tiny", "--out", str(out), *TINY]) == 2
    error = capsys.readouterr().err
    assert error == f"siamesenorm: --out: another comparison is at work in {str(out)!r}; wait for it or stop it\n"
    assert {path: path.stat().st_mtime_ns for path in out.rglob("*")} == before


def test_a_comparison_takes_its_folder_before_it_writes_there(tmp_path):
    """Of two that begin at once in a folder that is not there yet, one is refused."""
    one, other = OneComparison(tmp_path / "out"), OneComparison(tmp_path / "out")
    one.take()
    prepare_grid(tiny_grid(), tmp_path / "out", one=one)
    written = (tmp_path / "out" / "grid.json").read_bytes()
    with pytest.raises(DataError, match="another comparison is at work"):
        prepare_grid(tiny_grid(seeds=(5,)), tmp_path / "out", one=other)
    assert (tmp_path / "out" / "grid.json").read_bytes() == written
    one.close()
    prepare_grid(tiny_grid(seeds=(5,)), tmp_path / "out", one=other)
    other.close()


@pytest.mark.parametrize(
    ("asked", "threads", "jobs"),
    [("1", 1, 8), ("4", 4, 2), ("3,2", 3, 2), ("16", 16, 1), ("", 1, 8), ("0", 1, 8), ("many", 1, 8)],
)
def test_the_threads_of_a_cell_are_what_omp_num_threads_says(monkeypatch, asked, threads, jobs):
    monkeypatch.setenv("OMP_NUM_THREADS", asked)
    for module in ("engines", "runner"):
        monkeypatch.setattr(f"siamesenorm.lab.compare.{module}.available_cores", lambda: 8)
    monkeypatch.setattr("torch.cuda.device_count", lambda: 0)
    engine = local_engine()
    assert (engine.threads, engine.jobs) == (threads, jobs)
    assert local_engine(2).threads == (int(asked.partition(",")[0]) if asked in ("1", "4", "3,2", "16") else 4)


def test_cells_of_other_first_weights_are_not_mixed(tmp_path):
    """A run that is trained again between two calls has other weights under the same name."""
    source = tmp_path / "source"
    train(resolve("lm-tiny", [*TINY, "topology=pre"]), source)
    grid = partial(tiny_grid, f"train.init_from={source}", topologies=("pre",))
    prepared = prepare_grid(grid(), tmp_path / "out")
    (place,) = prepared.plan
    train(place.cell.config, place.folder)
    assert len(prepare_grid(grid(seeds=(0, 1)), tmp_path / "out").plan) == 2
    train(resolve("lm-tiny", [*TINY, "topology=pre", "seed=7"]), source, mode="restart")
    before = (tmp_path / "out" / "grid.json").read_bytes()
    with pytest.raises(ConfigError, match=r"train.init_from: .* is not what it was when .* began; give another --out"):
        prepare_grid(grid(seeds=(0, 1, 2)), tmp_path / "out")
    assert (tmp_path / "out" / "grid.json").read_bytes() == before
