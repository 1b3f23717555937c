"""Damage to any file of a checkpoint is seen, said in one sentence that names the file, and the one before is taken."""

from __future__ import annotations

import shutil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from siamesenorm.train.checkpoint.store import CheckpointStore

from .tiny import TinyRun, tiny_model

FILES = ["__0_0.distcp", "index.json", "progress.json", "manifest.json", "run.json"]


@pytest.fixture(scope="module")
def pristine(tmp_path_factory):
    """Two checkpoints, of steps 1 and 2, and the weights of each."""
    folder = tmp_path_factory.mktemp("pristine") / "checkpoints"
    run, store, weights = TinyRun(tiny_model()), CheckpointStore(folder, 2), {}
    for step in (1, 2):
        run.step()
        store.save(step, run.state, wait=True)
        weights[step] = {name: tensor.clone() for name, tensor in run.model.state_dict().items()}
    return folder, weights


def damaged(path, kind, place, bit):
    content = bytearray(path.read_bytes())
    at = int(place * len(content))
    if kind == "missing":
        path.unlink()
    elif kind == "truncated":
        path.write_bytes(content[:at])
    elif kind == "longer":
        path.write_bytes(content + b"\0")
    elif kind == "flipped":
        content[at] ^= 1 << bit
        path.write_bytes(content)
    else:
        path.write_bytes(b"")


@given(
    name=st.sampled_from(FILES[:4]),
    kind=st.sampled_from(["missing", "truncated", "longer", "flipped", "empty"]),
    place=st.floats(0, 0.999),
    bit=st.integers(0, 7),
)
def test_any_damage_is_seen(pristine, tmp_path_factory, name, kind, place, bit):
    folder, weights = pristine
    copy = tmp_path_factory.mktemp("damaged") / "checkpoints"
    shutil.copytree(folder, copy)
    path = copy / "step-00000002" / name
    damaged(path, kind, place, bit)

    said = []
    store = CheckpointStore(copy, 2, report=said.append)
    found, model = store.latest(), tiny_model(seed=3)
    store.load(found, {"model": model})
    loaded = model.state_dict()
    if name == "manifest.json" and found.step == 2:  # a flip in its spaces, say: it still says the same
        expected = weights[2]
    else:
        assert found.step == 1
        assert len(said) == 1
        assert said[0].startswith("damaged checkpoint: ")
        assert "\n" not in said[0]
        assert "step-00000002/" in said[0]
        if name != "manifest.json":
            assert f"step-00000002/{name} " in said[0]
        expected = weights[1]
    assert all(torch.equal(tensor, expected[key]) for key, tensor in loaded.items())
    shutil.rmtree(copy.parent)


def test_all_damaged_is_said_and_nothing_taken(pristine, tmp_path):
    copy = tmp_path / "checkpoints"
    shutil.copytree(pristine[0], copy)
    for step in (1, 2):
        damaged(copy / f"step-0000000{step}" / "__0_0.distcp", "flipped", 0.5, 0)
    said = []
    assert CheckpointStore(copy, 2, report=said.append).latest() is None
    assert len(said) == 2
    assert all("has another SHA-256 than when it was written; no complete checkpoint is left" in line for line in said)


def test_a_manifest_cannot_point_outside_its_folder(pristine, tmp_path):
    copy = tmp_path / "checkpoints"
    shutil.copytree(pristine[0], copy)
    manifest = copy / "step-00000002" / "manifest.json"
    manifest.write_text(manifest.read_text().replace("index.json", "../run.json"))
    said = []
    assert CheckpointStore(copy, 2, report=said.append).latest().step == 1
    assert "must be the name of a file in the same folder" in said[0]


def test_a_saved_step_is_saved_again_beside_its_damaged_self(pristine, tmp_path):
    copy = tmp_path / "checkpoints"
    shutil.copytree(pristine[0], copy)
    damaged(copy / "step-00000002" / "index.json", "truncated", 0.3, 0)
    store = CheckpointStore(copy, 2, report=lambda text: None)
    run = TinyRun(tiny_model())
    store.load(store.latest(), run.state)
    store.save(2, run.state, wait=True)
    assert store.latest().folder.name == "step-00000002-2"
