"""What a name stands for, and the corpora that need no download."""

import sys

import pytest

from siamesenorm.data import EMBEDDED, ByteTokenizer, DataError, embedded_documents, embedded_tokens
from siamesenorm.data.sources import find_sources
from siamesenorm.data.stdlib import LEFT_OUT, python_code, python_documentation


def test_folder_in_the_order_of_paths_without_hidden_files(tmp_path):
    for name in ("b.txt", "a/z.jsonl", "a/.hidden", ".git/x", "a/b.parquet", "c.json.gz"):
        path = tmp_path / "root" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text("x")
    found = find_sources([tmp_path / "root"])
    assert [(source.name, source.kind) for source in found] == [
        ("root/a/b.parquet", "parquet"),
        ("root/a/z.jsonl", "jsonl"),
        ("root/b.txt", "text"),
        ("root/c.json.gz", "jsonl"),
    ]
    assert [source.name for source in find_sources([tmp_path / "root"], pattern="*.txt")] == ["root/b.txt"]


@pytest.mark.parametrize(
    ("names", "options", "message"),
    [
        ([], {}, "sources: none given"),
        (["nowhere"], {}, "source: 'nowhere' is neither a file nor a folder nor one of python-code"),
        (["python-code:x=1"], {}, "python-code has no options"),
        (["arithmetic:size=1"], {}, "arithmetic: 'size=1' is not an option; the options are problems, digits"),
        (["arithmetic:digits=x"], {}, "arithmetic: digits = 'x' is not allowed"),
        (["arithmetic:digits=0"], {}, "arithmetic: digits = 0 is not allowed; it takes 1 to 30"),
        (["arithmetic:held_out=2"], {}, "held_out = 2.0 is not allowed; it takes 0.001 to 0.9"),
        (["python-code"], {"format": "csv"}, "format: 'csv' is not allowed; it takes auto, text, jsonl, parquet"),
    ],
)
def test_bad_names_are_said(names, options, message):
    with pytest.raises(DataError, match=message):
        find_sources(names, **options)


def test_what_cannot_be_text_is_said(tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "a.zst").write_bytes(b"x")
    with pytest.raises(DataError, match="holds no file"):
        find_sources([tmp_path / "empty"])
    with pytest.raises(DataError, match=r"ends in \.zst, which is not read; allowed are"):
        find_sources([tmp_path / "a.zst"])
    with pytest.raises(DataError, match=r"no file that matches pattern = '\*\.md'"):
        find_sources([tmp_path], pattern="*.md")


def test_python_code_is_the_library_without_its_tests():
    names = [name for name, _ in python_code()]
    assert names == sorted(names)
    assert {"argparse.py", "json/decoder.py", "asyncio/tasks.py"} <= set(names)
    assert not any(part in LEFT_OUT for name in names for part in name.split("/"))
    assert sum(len(text) for _, text in python_code()) > 5_000_000


def test_python_documentation_has_the_topics():
    names = [name for name, _ in python_documentation()]
    assert names == sorted(names)
    assert {"assert", "lambda", "with"} <= set(names)


@pytest.mark.parametrize("name", ["python-code", "python-docs"])
def test_held_out_files_are_whole_and_disjoint(name):
    train, held = (list(embedded_documents(name, split, seed=3)) for split in ("train", "validation"))
    assert train
    assert held
    assert not set(train) & set(held)
    everything = python_code() if name == "python-code" else python_documentation()
    assert len(train) + len(held) == len(everything)
    assert list(embedded_documents(name, "validation", seed=4)) != held


def test_embedded_tokens_decode_to_the_documents():
    tokens = embedded_tokens("python-docs", "validation")
    texts = list(embedded_documents("python-docs", "validation"))
    assert ByteTokenizer().decode(tokens.read(0, len(tokens))) == "".join(texts)
    assert tokens.text_bytes == len("".join(texts).encode())


def test_unknown_corpora_and_splits_are_said():
    with pytest.raises(DataError, match=f"'python' is not known; it takes one of {', '.join(EMBEDDED)}"):
        embedded_tokens("python")
    with pytest.raises(DataError, match="split: 'test' is not allowed; it takes train, validation"):
        embedded_tokens("python-docs", "test")


def test_data_room_opens_without_torch():
    import subprocess

    code = "import sys, siamesenorm.data.preparation, siamesenorm.commands.data; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
