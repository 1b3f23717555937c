"""Cells on Ray: the same results as in local processes, folders that travel, an absent package that is named."""

import importlib.util

import pytest

from siamesenorm.lab.compare import check_engine, prepare_grid
from siamesenorm.lab.ray_engine import packed, remote_cell, unpack
from siamesenorm.lab.runner import LocalEngine, Watcher
from siamesenorm.train.errors import ConfigError
from siamesenorm.train.folder import read_metrics

from .test_runner import tiny_grid


def losses(folder):
    return [record["loss"] for record in read_metrics(folder) if "loss" in record]


def test_an_absent_ray_names_the_extra(monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"siamesenorm\[ray\]"):
        check_engine("ray")


def test_a_folder_travels_whole(tmp_path):
    (tmp_path / "one" / "inner").mkdir(parents=True)
    (tmp_path / "one" / "inner" / "file.txt").write_text("text")
    unpack(packed(tmp_path / "one"), tmp_path / "two")
    assert (tmp_path / "two" / "inner" / "file.txt").read_text() == "text"
    assert packed(tmp_path / "nothing") == b""
    unpack(b"", tmp_path / "three")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["one", "two"]


def test_what_others_have_put_into_a_folder_stays_when_it_comes_back(tmp_path):
    far, near = tmp_path / "far", tmp_path / "near"
    for folder, text in ((far, "new"), (near, "old")):
        (folder / "checkpoints" / f"step-0000000{len(text)}").mkdir(parents=True)
        (folder / "status.json").write_text(text)
        (folder / "notes.txt").write_text(text)
    (near / "weights.safetensors").write_text("old")
    unpack(packed(far), near)
    assert {path.name: path.read_text() for path in near.iterdir() if path.is_file()} == {
        "status.json": "new",
        "notes.txt": "old",
    }
    (near / "checkpoints" / "notes.txt").write_text("mine")
    with pytest.raises(OSError, match="was not made by this program"):
        unpack(packed(far), near)
    assert (near / "status.json").read_text() == "new"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["far", "near"]


def test_a_machine_without_the_disk_sends_its_folder_back(tmp_path):
    from siamesenorm.lab.cell import Order

    prepared = prepare_grid(tiny_grid(topologies=("pre",)), tmp_path)
    (progress,) = prepared.plan
    order = Order(progress.cell.config.as_dict(), str(progress.folder), prepared.provenance)
    message, files = remote_cell(order, b"", str(tmp_path / "no such mark"))
    assert message == {"kind": "ended", "state": "finished"}
    assert not progress.folder.exists()
    assert files is not None
    unpack(files, progress.folder)
    assert len(losses(progress.folder)) == 12


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed (extra: ray)")
def test_ray_gives_what_local_processes_give(tmp_path):
    import ray

    from siamesenorm.lab.ray_engine import RayEngine

    ray.init(num_cpus=2, include_dashboard=False, log_to_driver=False, logging_level="error")
    try:
        far, near = (prepare_grid(tiny_grid(), tmp_path / name) for name in ("far", "near"))
        (far.plan[0].folder).mkdir(parents=True)
        (far.plan[0].folder / "stranger.txt").write_text("not a run")
        assert RayEngine(jobs=2).run(far.plan, far.provenance, Watcher())
    finally:
        ray.shutdown()
    assert LocalEngine(2, threads=1).run(near.plan, near.provenance, Watcher())
    assert [progress.state for progress in far.plan] == ["failed", "finished"]
    assert "holds other files" in far.plan[0].message
    assert losses(far.plan[1].folder) == losses(near.plan[1].folder)
    assert sorted(path.name for path in (tmp_path / "far" / "cells").iterdir()) == sorted(
        p.folder.name for p in far.plan
    )
