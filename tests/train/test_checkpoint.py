"""A checkpoint is complete or absent, and what it brings back is bitwise what was saved."""

from __future__ import annotations

import errno
import os
import pickle
import resource
import signal
import threading

import pytest
import torch
from safetensors.torch import load_file

from failing_files import contents, failing, yard
from siamesenorm.data.tensor_files import LazyTensors
from siamesenorm.errors import DataError
from siamesenorm.train import checkpoint as module
from siamesenorm.train import weights as weights_module
from siamesenorm.train.checkpoint.manifest import MANIFEST, CheckpointError, Manifest
from siamesenorm.train.checkpoint.store import CheckpointStore
from siamesenorm.train.weights import export_weights

from .tiny import TinyRun, tiny_model
from .worlds import run_world


@pytest.fixture(autouse=True)
def _elsewhere(tmp_path, monkeypatch):
    """A current folder that a save gone wrong may have, rather than the one with the source."""
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def said():
    return []


@pytest.fixture
def store(tmp_path, said):
    return CheckpointStore(tmp_path / "checkpoints", 2, report=said.append)


def weights(run):
    return {name: tensor.clone() for name, tensor in run.model.state_dict().items()}


def assert_same(ours, theirs):
    assert list(ours) == list(theirs)
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name


def test_a_resumed_run_goes_on_bit_for_bit(store):
    straight, broken = TinyRun(tiny_model(), noisy=True), TinyRun(tiny_model(), noisy=True)
    torch.manual_seed(5)
    expected = straight.steps(6)

    torch.manual_seed(5)
    first = broken.steps(3)
    store.save(3, {**broken.state, "tensors": {"random": torch.get_rng_state()}}, wait=True)

    resumed = TinyRun(tiny_model(seed=9), noisy=True)
    random = torch.zeros_like(torch.get_rng_state())
    checkpoint = store.latest()
    progress = store.load(checkpoint, {**resumed.state, "tensors": {"random": random}})
    torch.set_rng_state(random)
    resumed.done = progress["step"]
    assert first + resumed.steps(3) == expected
    assert_same(weights(resumed), weights(straight))
    for parameter, other in zip(resumed.model.parameters(), straight.model.parameters(), strict=True):
        assert_same(resumed.optimizer.state[parameter], straight.optimizer.state[other])


def test_a_save_in_the_background_holds_the_moment_it_was_asked_for(store, monkeypatch):
    """The write waits until training has gone on; what it writes is still the old state."""
    run = TinyRun(tiny_model())
    run.steps(2)
    saved = weights(run)
    gone_on, begun = threading.Event(), module.CheckpointStore._write_together

    def late(*args):
        gone_on.wait()
        return begun(*args)

    monkeypatch.setattr(module.CheckpointStore, "_write_together", late)
    state = run.state
    store.save(2, state)
    run.steps(2)
    state["progress"]["step"] = 99
    gone_on.set()
    assert store.finish()
    assert not all(torch.equal(tensor, saved[name]) for name, tensor in weights(run).items())
    progress = store.load(store.latest(), run.state)
    assert progress == {"step": 2}
    assert_same(weights(run), saved)


def test_the_newest_stay(store):
    run = TinyRun(tiny_model())
    for step in (10, 20, 30, 40):
        run.step()
        store.save(step, run.state, wait=True)
    assert sorted(p.name for p in store.folder.glob("step-*")) == ["step-00000030", "step-00000040"]
    assert store.latest().step == 40


def test_the_last_good_one_stays_whatever_lies_beside_it(store, said):
    """With keep = 2 and a damaged newer one, the good one survives the first save after a restart."""
    run = TinyRun(tiny_model())
    for step in (10, 20):
        store.save(step, run.state, wait=True)
    (store.folder / "step-00000020" / "index.json").write_text("{}")
    again = CheckpointStore(store.folder, 2, report=said.append)
    assert again.latest().step == 10
    again.save(30, run.state, wait=True)
    assert (store.folder / "step-00000010").exists()
    again.save(40, run.state, wait=True)
    assert sorted(p.name for p in store.folder.glob("step-*")) == ["step-00000030", "step-00000040"]


def test_one_that_others_have_put_something_into_stays_whole(store):
    run = TinyRun(tiny_model())
    store.save(10, run.state, wait=True)
    kept = store.folder / "step-00000010"
    (kept / "the best so far.txt").write_text("mine")
    before = contents(kept)
    for step in (20, 30, 40):
        store.save(step, run.state, wait=True)
    assert contents(kept) == before
    assert sorted(p.name for p in store.folder.glob("step-*")) == [kept.name, "step-00000030", "step-00000040"]


def test_a_folder_that_cannot_be_listed_is_no_folder_without_checkpoints(store):
    """Or else a run would begin anew and drop the metrics of all its steps."""
    store.save(10, TinyRun(tiny_model()).state, wait=True)
    with failing(store.folder, at=1, code=errno.EACCES), pytest.raises(PermissionError):
        store.latest()
    assert store.latest().step == 10


def save_in_yard(world, root):
    os.chdir(root / "work")
    said = []
    store = CheckpointStore(root / "work" / "saved", 2, world, report=said.append)
    return store.save(1, {"tensors": {"a": torch.zeros(3)}, "progress": {}}, wait=True), said


def test_two_processes_that_cannot_begin_remove_nothing(tmp_path):
    (yard(tmp_path) / "saved").write_text("mine")
    before = contents(tmp_path)
    found = run_world(2, save_in_yard, tmp_path)
    assert [saved for saved, _ in found] == [False, False]
    assert [len(said) for _, said in found] == [1, 0]
    assert contents(tmp_path) == before


def test_after_a_return_to_an_earlier_step_the_new_branch_is_the_latest(store):
    run = TinyRun(tiny_model())
    for step in (10, 20, 30):
        store.save(step, run.state, wait=True)
    run.step()  # from step 20 on, say, with other data
    store.save(30, run.state, wait=True)
    found = store.latest()
    assert found.folder.name == "step-00000030-2"
    store.save(25, run.state, wait=True)
    assert store.latest().step == 25


def test_what_a_killed_writer_left_is_neither_found_nor_in_the_way(store):
    run = TinyRun(tiny_model())
    store.save(10, run.state, wait=True)
    left = store.folder / ".step-00000020.partial"
    left.mkdir()
    (left / "__0_0.distcp").write_bytes(b"half a fi")
    assert store.latest().step == 10
    store.save(20, run.state, wait=True)
    assert not left.exists()
    assert store.latest().step == 20


def test_nothing_found_where_nothing_is(store, said):
    assert store.latest() is None
    assert said == []
    with pytest.raises(CheckpointError, match="keep: 0 is not allowed"):
        CheckpointStore(store.folder, 0)


def test_reading_executes_no_pickle(store, monkeypatch):
    """The index is JSON and tensors are read with weights_only, so Python's unpickler is never asked."""
    run = TinyRun(tiny_model())
    run.step()
    store.save(1, run.state, wait=True)

    def never(*args, **kwargs):
        raise AssertionError("unpickled")

    for name in ("load", "loads", "Unpickler"):
        monkeypatch.setattr(pickle, name, never)
    store.load(store.latest(), run.state)
    assert not list(store.folder.rglob("*.metadata"))


def test_the_manifest_names_every_file(store):
    store.save(7, TinyRun(tiny_model()).state, wait=True)
    found = store.latest()
    assert set(found.manifest.files) | {MANIFEST} == {p.name for p in found.folder.iterdir()}
    assert (found.step, found.manifest.sequence, found.manifest.world) == (7, 1, 1)
    assert Manifest.read(found.folder) == found.manifest


def test_a_checkpoint_of_another_run_is_not_taken(store, tmp_path, said):
    run = TinyRun(tiny_model())
    store.save(1, run.state, wait=True)
    other = CheckpointStore(tmp_path / "other", 2)
    other.save(9, run.state, wait=True)
    os.rename(other.folder / "step-00000009", store.folder / "step-00000009")
    assert store.latest().step == 1
    assert len(said) == 1
    assert "step-00000009/manifest.json is of run" in said[0]


def test_a_lost_identity_is_found_again_in_the_manifests(store):
    run = TinyRun(tiny_model())
    store.save(1, run.state, wait=True)
    before = store.latest().manifest.run
    (store.folder / "run.json").write_text("{")
    store.save(2, run.state, wait=True)
    assert store.latest().manifest.run == before


def test_another_model_is_refused_in_one_sentence(store):
    store.save(1, TinyRun(tiny_model()).state, wait=True)
    found = store.latest()
    with pytest.raises(CheckpointError, match=r"the checkpoint has no model/.*; it belongs to another model"):
        store.load(found, TinyRun(tiny_model("hyper")).state)
    wider = tiny_model()
    wider.head = torch.nn.Linear(16, 33, bias=False)
    with pytest.raises(CheckpointError, match=r"model/head.weight has shape \(32, 16\) in the checkpoint instead of"):
        store.load(found, {"model": wider})


# Full disks ------------------------------------------------------------------------------------------------


def test_a_full_disk_costs_the_new_checkpoint_only(store, said, monkeypatch):
    run = TinyRun(tiny_model())
    store.save(1, run.state, wait=True)
    kept = weights(run)
    run.step()
    real, full = os.fsync, OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    monkeypatch.setattr(os, "fsync", lambda descriptor: (_ for _ in ()).throw(full))
    assert store.save(2, run.state, wait=True) is False
    monkeypatch.setattr(os, "fsync", real)
    assert len(said) == 1
    assert said[0].startswith("checkpoint of step 2 was not saved: ")
    assert "no space left on device" in said[0]
    assert [p.name for p in store.folder.iterdir() if "2" in p.name] == []
    store.load(store.latest(), run.state)
    assert_same(weights(run), kept)
    assert store.save(3, run.state, wait=True) is True  # there is room again


def save_limited(_, folder, limit):
    """A second checkpoint where no file may grow beyond ``limit`` bytes: whether it was saved, and what was said."""
    run, said = TinyRun(tiny_model()), []
    run.step()
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
    saved = CheckpointStore(folder, 2, report=said.append).save(2, run.state, wait=True)
    resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return saved, said


@pytest.mark.parametrize("limit", [100, 4096, 100_000])
def test_files_that_cannot_grow(store, limit):
    """The system itself refuses to write more than `limit` bytes to a file, in the middle of the shard."""
    run = TinyRun(tiny_model())
    run.step()
    store.save(1, run.state, wait=True)
    [(saved, said)] = run_world(1, save_limited, store.folder, limit)
    assert saved is False
    assert len(said) == 1
    assert "step 2 was not saved" in said[0]
    assert store.latest().step == 1
    assert [p.name for p in store.folder.iterdir() if "2" in p.name] == []


# Weights ---------------------------------------------------------------------------------------------------


def test_exported_weights_are_the_models_own(tmp_path):
    run = TinyRun(tiny_model())
    run.step()
    file = tmp_path / "weights.safetensors"
    export_weights(run.model, file)
    assert_same(dict(sorted(load_file(file).items())), dict(sorted(weights(run).items())))
    other = {name: torch.zeros_like(tensor) for name, tensor in weights(run).items()}
    export_weights(run.model, file, other)
    assert all(not tensor.any() for tensor in load_file(file).values())
    assert [p.name for p in tmp_path.iterdir()] == [file.name]


def test_an_export_that_fails_gathers_what_others_gather(tmp_path, monkeypatch):
    """Whatever the error: every weight is asked for once, in the order of all processes, and no file is left."""
    tensors, asked = LazyTensors.of({name: torch.ones(2) for name in "abc"}), []

    def read(name):
        asked.append(name)
        return tensors.read(name).to(torch.float64 if name == "a" else torch.float32)

    monkeypatch.setattr(weights_module, "whole_weights", lambda model, given: LazyTensors(tensors.kinds, read))
    with pytest.raises(DataError, match=r"a: it is torch\.float64"):
        export_weights(tiny_model(), tmp_path / "weights.safetensors")
    assert asked == ["a", "b", "c"]
    assert not list(tmp_path.iterdir())
