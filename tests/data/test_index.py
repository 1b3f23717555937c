"""The index refuses what it does not know, and points nowhere but at its own folder."""

import json

import pytest

from siamesenorm.data import DataError, prepare, read_index, verify


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a.txt").write_text("hello world")
    prepare([tmp_path / "a.txt"], tmp_path / "out", validation=0.0, workers=1)
    return tmp_path / "out"


def change(folder, function):
    value = json.loads((folder / "index.json").read_text())
    function(value)
    (folder / "index.json").write_text(json.dumps(value))


BAD = [
    (lambda v: v.update(version=2), "version"),
    (lambda v: v.update(surprise=1), "surprise"),
    (lambda v: v.update(dtype="float32"), "dtype"),
    (lambda v: v.pop("tokenizer"), "tokenizer"),
    (lambda v: v["splits"]["train"].update(tokens=-1), r"splits\.train\.tokens"),
    (lambda v: v["splits"]["train"]["shards"][0].update(file="../../etc/passwd"), r"shards\.0\.file"),
    (lambda v: v["splits"]["train"]["shards"][0].update(file="/etc/passwd"), r"shards\.0\.file"),
    (lambda v: v["splits"]["train"]["shards"][0].update(sha256="no"), r"shards\.0\.sha256"),
]


@pytest.mark.parametrize(("function", "where"), BAD)
def test_what_is_wrong_is_said_with_its_place(folder, function, where):
    change(folder, function)
    with pytest.raises(DataError, match=rf"index\.json' is damaged at .*{where}"):
        read_index(folder)


def test_what_is_no_index_is_said(folder, tmp_path):
    (folder / "index.json").write_text("{")
    with pytest.raises(DataError, match="is damaged at the whole file"):
        read_index(folder)
    with pytest.raises(DataError, match=r"is not a prepared folder; it has no index\.json"):
        read_index(tmp_path)
    with pytest.raises(DataError, match="is a file; name the folder"):
        read_index(tmp_path / "a.txt")


@pytest.mark.parametrize("bit", range(8))
def test_one_flipped_bit_is_found(folder, bit):
    path = folder / "train-00000.npy"
    raw = bytearray(path.read_bytes())
    raw[7] ^= 1 << bit
    path.write_bytes(raw)
    assert verify(folder) == ["train-00000.npy"]


def test_every_kind_of_file_is_verified(folder):
    names = [path.name for path in folder.iterdir() if path.name != "index.json"]
    heard = []
    assert verify(folder, done=lambda name, sound: heard.append(name)) == []
    assert sorted(heard) == sorted(names)
    for name in names:
        (folder / name).unlink()
    assert sorted(verify(folder)) == sorted(names)
