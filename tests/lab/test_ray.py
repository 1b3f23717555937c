"""Cells on Ray: the same results as in local processes, folders that travel, an absent package that is named."""

import contextlib
import importlib.util
import os
from pathlib import Path

import pytest

from siamesenorm.errors import ConfigError
from siamesenorm.lab.compare.engines import check_engine
from siamesenorm.lab.compare.preparation import prepare_grid
from siamesenorm.lab.compare.ray_engine import cluster_here, packed, remote_cell, unpack
from siamesenorm.lab.compare.runner import GridWatcher, LocalEngine
from siamesenorm.train.folder import read_metrics

from .test_runner import tiny_grid

LOOPBACK = ("0100007F", "0000000000000000FFFF00000100007F", "00000000000000000000000001000000")


def listening_places():
    """Addresses at which this process and all below it wait for connections, as the kernel writes them."""
    parents = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parents[int(stat.parent.name)] = int(stat.read_text().rpartition(")")[2].split()[1])
    ours = {os.getpid()}
    while more := {process for process, parent in parents.items() if parent in ours} - ours:
        ours |= more
    sockets = set()
    for process in ours:
        for file in Path(f"/proc/{process}/fd").glob("*"):
            with contextlib.suppress(OSError):
                sockets.add(os.readlink(file))
    rows = [line.split() for kind in ("tcp", "tcp6") for line in Path(f"/proc/net/{kind}").read_text().splitlines()[1:]]
    return [row[1].partition(":")[0] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in sockets]


def test_a_cluster_is_one_that_was_started_for_the_machine(tmp_path, monkeypatch):
    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path))
    assert not cluster_here()
    (tmp_path / "ray").mkdir()
    (tmp_path / "ray" / "ray_current_cluster").write_text("10.0.0.1:6379")
    assert cluster_here()
    monkeypatch.setenv("RAY_TMPDIR", str(tmp_path / "empty"))
    assert not cluster_here()
    monkeypatch.setenv("RAY_ADDRESS", "10.0.0.1:6379")
    assert cluster_here()


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed (extra: ray)")
def test_an_address_that_is_none_is_said_in_one_sentence(monkeypatch):
    from siamesenorm.lab.compare.ray_engine import RayEngine

    monkeypatch.setenv("RAY_ADDRESS", "nonsense")
    with pytest.raises(ConfigError, match=r"--engine: 'ray' cannot be reached or started: .*nonsense"):
        RayEngine()


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
    from siamesenorm.lab.compare.cell import CellOrder

    prepared = prepare_grid(tiny_grid(topologies=("pre",)), tmp_path)
    (progress,) = prepared.plan
    order = CellOrder(progress.cell.config.as_dict(), str(progress.folder), prepared.provenance)
    message, files = remote_cell(order, b"", str(tmp_path / "no such mark"))
    assert message == {"kind": "ended", "state": "finished"}
    assert not progress.folder.exists()
    assert files is not None
    unpack(files, progress.folder)
    assert len(losses(progress.folder)) == 12


@pytest.mark.skipif(importlib.util.find_spec("ray") is None, reason="ray is not installed (extra: ray)")
def test_ray_gives_what_local_processes_give_and_listens_to_this_machine_alone(tmp_path, monkeypatch):
    import ray

    from siamesenorm.lab.compare.ray_engine import RayEngine

    monkeypatch.delenv("RAY_ADDRESS", raising=False)
    monkeypatch.setenv("RAY_worker_niceness", "0")  # on a machine at work it would wait for all others
    monkeypatch.setattr("siamesenorm.lab.compare.ray_engine.CURRENT", "no such file")  # another's cluster is not ours
    engine = RayEngine(jobs=2)
    try:
        far, near = (prepare_grid(tiny_grid(), tmp_path / name) for name in ("far", "near"))
        (far.plan[0].folder).mkdir(parents=True)
        (far.plan[0].folder / "stranger.txt").write_text("not a run")
        assert engine.run(far.plan, far.provenance, GridWatcher())
        assert ray.util.get_node_ip_address() == "127.0.0.1"
        if Path("/proc/net/tcp").exists():
            places = listening_places()
            assert len(places) > 3
            assert not [place for place in places if place not in LOOPBACK]
    finally:
        ray.shutdown()
    assert LocalEngine(2, threads=1).run(near.plan, near.provenance, GridWatcher())
    assert [progress.state for progress in far.plan] == ["failed", "finished"]
    assert "holds other files" in far.plan[0].message
    assert losses(far.plan[1].folder) == losses(near.plan[1].folder)
    assert sorted(path.name for path in (tmp_path / "far" / "cells").iterdir()) == sorted(
        p.folder.name for p in far.plan
    )
