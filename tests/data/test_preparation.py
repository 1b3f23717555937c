"""Preparation: the same bytes from any number of workers, every document once, nothing left of bad input."""

import csv
import gzip
import json

import numpy as np
import pytest

from siamesenorm.data import ByteTokenizer, DataError, load_tokenizer, prepare, read_index, train_bpe, verify
from siamesenorm.data.documents import Document, Reading
from siamesenorm.data.held_out import hold_out, split_document
from siamesenorm.data.sources import find_sources
from siamesenorm.data.workers import Progress

from .folders import contents, write_sources

OPTIONS = {"shard_bytes": 4000, "validation": 0.2, "seed": 5}


@pytest.fixture(scope="module")
def sources(tmp_path_factory):
    return write_sources(tmp_path_factory.mktemp("sources"))


@pytest.fixture(scope="module")
def prepared(tmp_path_factory, sources):
    out = tmp_path_factory.mktemp("prepared") / "out"
    return out, prepare(sources, out, workers=1, **OPTIONS)


def documents_of(folder, index, split):
    tokens = [np.fromfile(folder / shard.file, dtype=index.dtype) for shard in index.splits[split].shards]
    flat = np.concatenate(tokens)
    parts = np.split(flat, np.flatnonzero(flat == index.tokenizer.eos_id) + 1)
    assert parts[-1].size == 0
    tokenizer = load_tokenizer(folder)
    return [tokenizer.decode(part) for part in parts[:-1]]


def expected_documents(sources, split, tokenizer=None):
    from pathlib import Path

    reading = hold_out(find_sources(sources), Reading(seed=5, validation=0.2), tokenizer or ByteTokenizer())
    texts = [path.read_text("utf-8") for path in sorted(Path(sources[0]).iterdir())]
    texts += [json.loads(line)["text"] for line in Path(sources[1]).read_text("utf-8").splitlines()]
    parts = [part for text in texts if text.strip() for part in split_document(Document(text, ""), reading)]
    return [part.text for part in parts if part.split == split]


@pytest.mark.parametrize("split", ["train", "validation"])
def test_every_document_is_there_once_in_order_in_its_split(prepared, sources, split):
    folder, index = prepared
    assert len(index.splits[split].shards) > 3
    assert documents_of(folder, index, split) == expected_documents(sources, split)


def test_counts_sizes_and_checksums(prepared, sources):
    folder, index = prepared
    assert read_index(folder) == index
    assert verify(folder) == []
    for name, split in index.splits.items():
        texts = expected_documents(sources, name)
        assert split.documents == len(texts)
        assert split.text_bytes == sum(len(text.encode()) for text in texts)
        assert split.tokens == split.text_bytes + split.documents
    assert index.skipped["empty"] > 1
    assert index.tokenizer.fingerprint == ByteTokenizer().fingerprint
    assert [source.name for source in index.sources][-1] == "lines.jsonl"


def test_boundaries_are_those_of_the_documents(prepared):
    folder, index = prepared
    for split in index.splits.values():
        for shard in split.shards:
            tokens = np.fromfile(folder / shard.file, dtype=index.dtype)
            with gzip.open(folder / shard.boundaries, "rt", newline="") as file:
                rows = list(csv.reader(file))
            ends = np.flatnonzero(tokens == index.tokenizer.eos_id) + 1
            assert [int(row[1]) for row in rows] == ends.tolist()
            assert [int(row[0]) for row in rows] == [0, *ends[:-1].tolist()]
            assert {row[3] for row in rows} <= {source.name for source in index.sources}


@pytest.mark.parametrize("workers", [2, 5])
def test_workers_do_not_change_a_byte(prepared, sources, tmp_path, workers):
    prepare(sources, tmp_path / "out", workers=workers, **OPTIONS)
    assert contents(tmp_path / "out") == contents(prepared[0])


def test_workers_do_not_change_a_byte_with_bpe(sources, tmp_path):
    pytest.importorskip("tokenizers")
    tokenizer = train_bpe(["alpha beta gamma 12 + é\n" * 10], 280)
    for workers in (1, 2):
        prepare(sources, tmp_path / str(workers), tokenizer=tokenizer, workers=workers, **OPTIONS)
    assert contents(tmp_path / "1") == contents(tmp_path / "2")
    index = read_index(tmp_path / "1")
    for split in index.splits:
        assert documents_of(tmp_path / "1", index, split) == expected_documents(sources, split, tokenizer)


def test_seed_and_share_decide_the_split(sources, tmp_path):
    other = prepare(sources, tmp_path / "a", **OPTIONS | {"seed": 6, "workers": 1})
    none = prepare(sources, tmp_path / "b", **OPTIONS | {"validation": 0.0, "workers": 1})
    assert other.splits["validation"].documents != len(expected_documents(sources, "validation")) or (
        documents_of(tmp_path / "a", other, "validation") != expected_documents(sources, "validation")
    )
    assert (none.splits["train"].text_bytes, none.splits["validation"].documents) == (
        sum(split.text_bytes for split in other.splits.values()),
        0,
    )


def test_shards_are_in_the_layout_of_olmo(prepared):
    folder, index = prepared
    shard = index.splits["train"].shards[0]
    raw = np.memmap(folder / shard.file, dtype=np.uint16, mode="r")
    assert raw.size == shard.tokens
    assert raw[-1] == index.tokenizer.eos_id
    assert (folder / shard.file).read_bytes()[:6] != b"\x93NUMPY"


class Watched(Progress):
    def __init__(self):
        self.made, self.kept, self.bytes, self.total = [], 0, 0, 0

    def begin(self, total, todo, kept):
        self.kept, self.total = kept, total

    def update(self, size, tokens):
        assert size >= self.bytes
        self.bytes = size

    def chunk(self, record):
        self.made.append(record.number)


def test_progress_counts_every_byte_and_a_second_run_makes_nothing(sources, tmp_path):
    first, second = Watched(), Watched()
    index = prepare(sources, tmp_path / "out", workers=1, progress=first, **OPTIONS)
    before = contents(tmp_path / "out")
    assert first.bytes == first.total == sum(source.bytes for source in index.sources)
    assert prepare(sources, tmp_path / "out", workers=1, progress=second, **OPTIONS) == index
    assert second.made == []
    assert contents(tmp_path / "out") == before


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "boundaries"])
def test_damaged_shards_are_found_and_made_again(prepared, sources, tmp_path, damage):
    import shutil

    folder = tmp_path / "out"
    shutil.copytree(prepared[0], folder)
    shard = prepared[1].splits["train"].shards[2]
    path = folder / (shard.boundaries if damage == "boundaries" else shard.file)
    raw = bytearray(path.read_bytes())
    if damage == "truncate":
        del raw[-2:]
    else:
        raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)
    if damage == "remove":
        path.unlink()
    assert verify(folder) == [path.name]
    watched = Watched()
    prepare(sources, folder, workers=1, progress=watched, **OPTIONS)
    assert watched.made == [2]
    assert contents(folder) == contents(prepared[0])


def test_another_preparation_is_not_mixed_in(prepared, sources, tmp_path):
    import shutil

    folder = tmp_path / "out"
    shutil.copytree(prepared[0], folder)
    with pytest.raises(DataError, match=r"holds another preparation .* or set overwrite"):
        prepare(sources, folder, **OPTIONS | {"seed": 9})
    assert contents(folder) == contents(prepared[0])
    prepare(sources[:1], folder, workers=1, overwrite=True, **OPTIONS)
    prepare(sources[:1], tmp_path / "clean", workers=1, **OPTIONS)
    assert contents(folder) == contents(tmp_path / "clean")


def test_two_preparations_do_not_share_a_folder(sources, tmp_path):
    class Second(Progress):
        def begin(self, total, todo, kept):
            with pytest.raises(DataError, match="another preparation is at work"):
                prepare(sources, tmp_path / "out", workers=1, **OPTIONS)
            self.tried = True

    second = Second()
    prepare(sources, tmp_path / "out", workers=1, progress=second, **OPTIONS)
    assert second.tried


BAD = [
    ({"validation": 0.7}, "validation: 0.7 is not allowed; input should be less than or equal to 0.5"),
    ({"validation": float("nan")}, "validation: nan is not allowed"),
    ({"unit": "word"}, "unit: 'word' is not allowed; input should be 'file', 'line' or 'paragraph'"),
    ({"invalid": "maybe"}, "invalid: 'maybe' is not allowed"),
    ({"field": ""}, "field: '' is not allowed"),
    ({"shard_bytes": 0}, "shard_bytes: 0 is not allowed; input should be greater than or equal to 1"),
    ({"seed": "x"}, "seed: 'x' is not allowed"),
    ({"workers": 0}, "workers: 0 is not allowed; it takes 1 or more"),
    ({"tokenizer": "word"}, "tokenizer: 'word' is not known"),
    ({"field": "body"}, r"lines\.jsonl, line 1: no field 'body'; the fields are text, other"),
]


@pytest.mark.parametrize(("options", "message"), BAD)
def test_bad_settings_are_said_and_leave_nothing(sources, tmp_path, options, message):
    with pytest.raises(DataError, match=message):
        prepare(sources[1:], tmp_path / "out", **{"workers": 1} | options)
    assert not (tmp_path / "out").exists()


def test_bad_lines_stop_several_workers_too(tmp_path):
    lines = [json.dumps({"text": "x" * 100}) for _ in range(200)]
    lines[150] = "{broken"
    (tmp_path / "a.jsonl").write_text("\n".join(lines))
    with pytest.raises(DataError, match=r"a\.jsonl, line 151: not valid JSON"):
        prepare([tmp_path / "a.jsonl"], tmp_path / "out", workers=2, shard_bytes=1000)
    with pytest.raises(DataError, match=r"is unfinished|is not a prepared folder"):
        read_index(tmp_path / "out")
    index = prepare([tmp_path / "a.jsonl"], tmp_path / "b", workers=2, shard_bytes=1000, invalid="skip", validation=0.0)
    assert index.skipped == {"invalid": 1}
    assert index.splits["train"].documents == 199


def test_no_text_is_said(tmp_path):
    (tmp_path / "a.txt").write_text("")
    with pytest.raises(DataError, match="hold no text; every file is empty"):
        prepare([tmp_path / "a.txt"], tmp_path / "out")
    (tmp_path / "b.txt").write_text("  \n")
    with pytest.raises(DataError, match=r"no document with text is left; left out were \{'empty': 1\}"):
        prepare([tmp_path / "b.txt"], tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_folders_of_other_things_are_not_written_to(sources, tmp_path):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "me.jpg").write_bytes(b"x")
    with pytest.raises(DataError, match=r"holds other files, such as 'me\.jpg'"):
        prepare(sources, tmp_path / "photos")
    with pytest.raises(DataError, match="is a file; name a folder"):
        prepare(sources, tmp_path / "photos" / "me.jpg")
    write_sources(tmp_path / "in")
    with pytest.raises(DataError, match="holds the source"):
        prepare([tmp_path / "in" / "texts"], tmp_path / "in" / "texts")
    assert contents(tmp_path / "photos") == {"me.jpg": b"x"}


@pytest.mark.parametrize("names", [["tokenizer.json"], ["index.json", "train-00000.npy"], [".progress/notes.json"]])
def test_files_of_others_that_have_our_names_stay(sources, tmp_path, names):
    """Somebody's tokenizer, somebody's index, and records of something else, also where overwriting is allowed."""
    folder = tmp_path / "out"
    for name in names:
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text('{"format": "theirs"}')
    before = contents(folder)
    for overwrite in (False, True):
        with pytest.raises(DataError, match=rf"holds other files, such as '{names[0]}'"):
            prepare(sources, folder, workers=1, overwrite=overwrite, **OPTIONS)
    assert contents(folder) == before


def test_a_damaged_index_is_still_known_as_ours(prepared, sources, tmp_path):
    import shutil

    folder = tmp_path / "out"
    shutil.copytree(prepared[0], folder)
    (folder / "index.json").write_text((folder / "index.json").read_text()[:200])
    (folder / "README.md").write_text("mine")
    with pytest.raises(DataError, match="is damaged"):
        prepare(sources, folder, workers=1, **OPTIONS)
    prepare(sources, folder, workers=1, overwrite=True, **OPTIONS)
    assert contents(folder) == {**contents(prepared[0]), "README.md": b"mine"}


def test_an_interrupted_replacement_goes_on_and_the_other_preparation_is_whole_meanwhile(prepared, sources, tmp_path):
    import shutil

    class Stop(Progress):
        def chunk(self, record):
            if record.number == 3:
                raise KeyboardInterrupt

    folder, options = tmp_path / "out", {**OPTIONS, "seed": 6, "workers": 1, "overwrite": True}
    shutil.copytree(prepared[0], folder)
    with pytest.raises(KeyboardInterrupt):
        prepare(sources, folder, progress=Stop(), **options)
    assert verify(folder) == []
    assert read_index(folder) == prepared[1]
    watched = Watched()
    prepare(sources, folder, progress=watched, **options)
    assert watched.kept == 4
    prepare(sources, tmp_path / "clean", **{**options, "overwrite": False})
    assert contents(folder) == contents(tmp_path / "clean")
    with pytest.raises(KeyboardInterrupt):  # one that is given up leaves nothing
        prepare(sources, folder, progress=Stop(), **{**options, "seed": 7})
    prepare(sources, folder, **options)
    assert contents(folder) == contents(tmp_path / "clean")
    shard = folder / read_index(folder).splits["train"].shards[0].file  # and a shard that was moved to another disk
    shard.rename(tmp_path / "elsewhere.npy")
    shard.symlink_to(tmp_path / "elsewhere.npy")
    with pytest.raises(DataError, match=f"{shard.name}' is a link, which this program did not make; move it away"):
        prepare(sources, folder, progress=watched, **{**options, "seed": 7})
    assert verify(folder) == []
    assert shard.is_symlink()


def test_a_full_disk_leaves_what_was_finished(sources, tmp_path, monkeypatch):
    import errno
    import os

    real, calls = os.fsync, []

    def full(descriptor):
        calls.append(descriptor)
        if len(calls) > 40:
            raise OSError(errno.ENOSPC, "No space left on device")
        real(descriptor)

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(OSError, match="No space left"):
        prepare(sources, tmp_path / "out", workers=1, **OPTIONS)
    monkeypatch.setattr(os, "fsync", real)
    assert not list((tmp_path / "out").rglob("*.partial"))
    watched = Watched()
    prepare(sources, tmp_path / "out", workers=1, progress=watched, **OPTIONS)
    assert watched.kept > 0
    prepare(sources, tmp_path / "whole", workers=1, **OPTIONS)
    assert contents(tmp_path / "out") == contents(tmp_path / "whole")
