"""Token files read as one sequence, as OLMo has them, without being in memory."""

import resource
import subprocess
import sys

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from siamesenorm.data import ByteTokenizer, DataError, Tokens, open_tokens, prepare, tokens_in_memory
from siamesenorm.data import tokens as module


@given(st.lists(st.integers(0, 9), min_size=1, max_size=8), st.data())
def test_reading_crosses_the_borders_of_files(counts, data):
    parts, total = [], 0
    for count in counts:
        parts.append(np.arange(total, total + count, dtype="<u2"))
        total += count
    tokens = Tokens(parts, name="parts")
    assert len(tokens) == total
    start = data.draw(st.integers(0, total))
    stop = data.draw(st.integers(start, total))
    assert tokens.read(start, stop).tolist() == list(range(start, stop))
    length = data.draw(st.integers(0, total))
    starts = np.array(data.draw(st.lists(st.integers(0, total - length), max_size=5)), dtype=np.int64)
    assert tokens.gather(starts, length).tolist() == [list(range(s, s + length)) for s in starts.tolist()]


def test_olmo_arrays_are_read_as_they_are(tmp_path):
    """Written by NumPy's memmap alone, with no index, in nested folders."""
    written = []
    for number, name in enumerate(("part-0-00000.npy", "part-1-00000.npy", "more/part-2-00000.npy")):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        part = np.memmap(path, mode="w+", dtype=np.uint16, shape=(100 + number,))
        part[:] = np.arange(100 + number) + 60_000
        part.flush()
        written.append((path, part.tolist()))
    whole = open_tokens(tmp_path, eos_id=50279)
    assert whole.read(0, len(whole)).tolist() == [token for _, part in sorted(written) for token in part]
    assert whole.eos_id == 50279
    single = open_tokens(tmp_path / "part-0-00000.npy")
    assert single.read(3, 5).tolist() == [60003, 60004]
    pair = open_tokens([tmp_path / "part-1-00000.npy", tmp_path / "part-0-00000.npy"])
    assert pair.read(100, 102).tolist() == [60100, 60000]


@pytest.mark.parametrize("dtype", ["uint16", "uint32"])
def test_arrays_with_a_header_are_read_too(tmp_path, dtype):
    np.save(tmp_path / "a.npy", np.arange(50, dtype=dtype))
    assert open_tokens(tmp_path / "a.npy").read(0, 50).tolist() == list(range(50))


def test_wide_ids(tmp_path):
    np.array([70_000, 5], dtype="<u4").tofile(tmp_path / "a.npy")
    assert open_tokens(tmp_path / "a.npy", dtype="uint32").read(0, 2).tolist() == [70_000, 5]


def test_prepared_folder_and_memory_hold_the_same(tmp_path):
    texts = [f"text {number}" for number in range(20)]
    (tmp_path / "a.txt").write_text("\n".join(texts))
    prepare([tmp_path / "a.txt"], tmp_path / "out", unit="line", validation=0.0, workers=1, shard_bytes=30)
    on_disk, held = open_tokens(tmp_path / "out"), tokens_in_memory(texts, ByteTokenizer(), "held")
    assert on_disk.read(0, len(on_disk)).tolist() == held.read(0, len(held)).tolist()
    assert (on_disk.eos_id, on_disk.vocab_size, on_disk.fingerprint) == (held.eos_id, 258, held.fingerprint)
    assert on_disk.text_bytes == held.text_bytes


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "a.txt").write_text("hello")
    prepare([tmp_path / "a.txt"], tmp_path / "out", validation=0.0, workers=1)
    return tmp_path / "out"


def test_a_truncated_or_missing_shard_is_said_on_opening(folder):
    shard = folder / "train-00000.npy"
    shard.write_bytes(shard.read_bytes()[:-2])
    with pytest.raises(DataError, match=r"train-00000\.npy' has 10 bytes instead of 12; prepare the folder again"):
        open_tokens(folder)
    shard.unlink()
    with pytest.raises(DataError, match="is missing"):
        open_tokens(folder)


def test_ids_beyond_the_vocabulary_are_said(folder):
    np.array([5, 6, 7, 8, 9, 60_000], dtype="<u2").tofile(folder / "train-00000.npy")
    with pytest.raises(DataError, match="holds id 60000; its vocabulary has 0 to 257"):
        open_tokens(folder).read(0, 6)


def test_bad_data_is_said(folder, tmp_path):
    with pytest.raises(DataError, match=r"split: 'test' is not allowed; .* has train, validation"):
        open_tokens(folder, split="test")
    with pytest.raises(DataError, match=r"is neither a prepared folder, nor a \.npy file"):
        open_tokens(tmp_path / "nowhere")
    with pytest.raises(DataError, match="dtype: 'int8' is not allowed; it takes uint16, uint32"):
        open_tokens(tmp_path, dtype="int8")
    (tmp_path / "odd.npy").write_bytes(b"abc")
    with pytest.raises(DataError, match="has 3 bytes, which is no whole number of uint16 tokens"):
        open_tokens(tmp_path / "odd.npy")
    np.save(tmp_path / "float.npy", np.zeros(3))
    with pytest.raises(DataError, match="is float64 of shape"):
        open_tokens(tmp_path / "float.npy")
    np.save(tmp_path / "object.npy", np.array([{}]), allow_pickle=True)
    with pytest.raises(DataError, match="not a sound NumPy file"):
        open_tokens(tmp_path / "object.npy")
    with pytest.raises(IndexError):
        open_tokens(folder).read(0, 7)


def test_more_files_than_may_be_open(tmp_path, monkeypatch):
    monkeypatch.setattr(module, "OPEN_FILES", 3)
    for number in range(20):
        np.full(2, number, dtype="<u2").tofile(tmp_path / f"{number:02}.npy")
    tokens = open_tokens(tmp_path)
    assert tokens.read(0, 40).tolist() == [number for number in range(20) for _ in range(2)]
    assert tokens.read(0, 40).tolist() == tokens.read(0, 40).tolist()
    assert len(tokens._mapped) == 3


CODE = """
import resource, sys
import numpy as np
from siamesenorm.data.tokens import open_tokens
from siamesenorm.data.order import shuffled
def peak(): return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss // 1024
before = peak()
tokens = open_tokens(sys.argv[1])
assert len(tokens) == 1 << 37
places = shuffled(np.arange(200), (len(tokens) - 1) // 2048, 0) * 2048
assert not tokens.gather(places, 2049).any()
print(peak() - before)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="sparse files and RSS as Linux has them")
def test_a_quarter_of_a_terabyte_costs_no_memory(tmp_path):
    for number in range(4):
        with open(tmp_path / f"{number}.npy", "wb") as file:
            file.truncate(1 << 36)
    assert resource.getpagesize() >= 4096
    done = subprocess.run([sys.executable, "-c", CODE, str(tmp_path)], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 100
