"""Files cut into pieces hold every document once, and what cannot be read is said with its place."""

import gzip
import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from siamesenorm.data import DataError
from siamesenorm.data.documents import Reading
from siamesenorm.data.files import JsonLinesFile, TextFile


def texts_of(source, reading, target):
    skipped = Counter()
    texts = [
        document.text for piece in source.pieces(target, reading) for document in source.read(piece, reading, skipped)
    ]
    return texts, skipped


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    return tmp_path_factory.mktemp("files") / "file"


LINES = st.lists(st.text(st.sampled_from("ab é\r"), max_size=6), max_size=12)


@given(LINES, st.integers(1, 40), st.sampled_from(["\n", "\r\n"]))
def test_lines_do_not_depend_on_the_cut(path, lines, target, newline):
    path.write_bytes(newline.join(lines).encode())
    source = TextFile("file", path)
    reading = Reading(unit="line")
    whole, _ = texts_of(source, reading, 1 << 30)
    assert texts_of(source, reading, target)[0] == whole
    assert [line.strip("\r") for line in whole if line.strip("\r")] == [
        line.strip("\r") for line in "\n".join(lines).split("\n") if line.strip("\r")
    ] or "\r" in "".join(lines)


@given(
    st.lists(st.sampled_from(["a", "bb", "", "", "é"]), max_size=14),
    st.integers(1, 30),
    st.sampled_from(["\n", "\r\n"]),
)
def test_paragraphs_do_not_depend_on_the_cut(path, lines, target, newline):
    path.write_bytes(newline.join(lines).encode())
    expected = [part.strip("\n") for part in "\n".join(lines).split("\n\n") if part.strip("\n")]
    found, _ = texts_of(TextFile("file", path), Reading(unit="paragraph"), target)
    assert [text.replace("\r\n", "\n") for text in found] == expected


@given(st.lists(st.text(), max_size=10), st.integers(1, 60))
def test_json_lines_do_not_depend_on_the_cut(path, texts, target):
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    assert texts_of(JsonLinesFile("file", path), Reading(), target)[0] == texts


def test_gzipped_files_read_the_same(tmp_path):
    lines = "".join(json.dumps({"body": f"text {number}"}) + "\n" for number in range(50))
    (tmp_path / "a.jsonl").write_text(lines)
    (tmp_path / "a.jsonl.gz").write_bytes(gzip.compress(lines.encode()))
    reading = Reading(field="body")
    plain = texts_of(JsonLinesFile("a", tmp_path / "a.jsonl"), reading, 100)
    assert texts_of(JsonLinesFile("a", tmp_path / "a.jsonl.gz"), reading, 100) == plain
    for unit in ("file", "line", "paragraph"):
        units = Reading(unit=unit)
        plain = texts_of(TextFile("a", tmp_path / "a.jsonl"), units, 1 << 20)
        assert texts_of(TextFile("a", tmp_path / "a.jsonl.gz"), units, 1 << 20) == plain


def test_byte_order_mark_is_no_text(tmp_path):
    (tmp_path / "a").write_bytes(b"\xef\xbb\xbfhello")
    assert texts_of(TextFile("a", tmp_path / "a"), Reading(), 10)[0] == ["hello"]
    (tmp_path / "b").write_bytes(b'\xef\xbb\xbf{"text": "hello"}')
    assert texts_of(JsonLinesFile("b", tmp_path / "b"), Reading(), 10)[0] == ["hello"]


def test_empty_file_has_no_document(tmp_path):
    (tmp_path / "a").write_bytes(b"")
    assert texts_of(TextFile("a", tmp_path / "a"), Reading(), 10) == ([], Counter())


BAD_LINES = [
    (b'{"text": "x"', r"a\.jsonl, line 3: not valid JSON"),
    (b"[1, 2]", r"a\.jsonl, line 3: '\[1, 2\]\\n' is not a JSON object"),
    (b'{"body": "x"}', r"a\.jsonl, line 3: no field 'text'; the fields are body"),
    (b'{"text": 7}', r"a\.jsonl, line 3: field 'text' holds a number; allowed is text"),
    (b'{"text": null}', r"a\.jsonl, line 3: field 'text' holds nothing"),
    (b'{"text": "\\ud800"}', r"a\.jsonl, line 3: field 'text' holds half a surrogate pair"),
    (b'{"text": "\xff"}', r"a\.jsonl, line 3: byte 10 \(0xff\) is not UTF-8"),
    (b"[" * 100_000, r"a\.jsonl, line 3: not valid JSON"),
]


@pytest.mark.parametrize(("line", "message"), BAD_LINES)
@pytest.mark.parametrize("packed", [False, True])
def test_bad_lines_are_said_with_their_place_or_left_out(tmp_path, line, message, packed):
    content = b'{"text": "one"}\n\n' + line + b'\n{"text": "two"}\n'
    path = tmp_path / ("a.jsonl.gz" if packed else "a.jsonl")
    path.write_bytes(gzip.compress(content) if packed else content)
    source = JsonLinesFile("a.jsonl", path)
    with pytest.raises(DataError, match=message):
        texts_of(source, Reading(), 20)
    assert texts_of(source, Reading(invalid="skip"), 20) == (["one", "two"], Counter(invalid=1))


def test_bad_bytes_can_be_replaced(tmp_path):
    (tmp_path / "a").write_bytes(b"caf\xe9 au lait")
    source = TextFile("a", tmp_path / "a")
    with pytest.raises(DataError, match=r"a: byte 3 \(0xe9\) is not UTF-8"):
        texts_of(source, Reading(), 10)
    assert texts_of(source, Reading(invalid="replace"), 10)[0] == ["caf\ufffd au lait"]
    (tmp_path / "b").write_text('{"text": "a\\ud800b \\ud83d\\ude00"}')
    assert texts_of(JsonLinesFile("b", tmp_path / "b"), Reading(invalid="replace"), 10)[0] == ["a\ufffdb 😀"]


@pytest.mark.parametrize("damage", ["truncate", "flip", "plain"])
def test_damaged_gzip_is_said(tmp_path, damage):
    packed = bytearray(gzip.compress(b"hello world\n" * 1000))
    if damage == "truncate":
        del packed[-20:]
    elif damage == "flip":
        packed[len(packed) // 2] ^= 0xFF
    else:
        packed = bytearray(b"no gzip at all")
    (tmp_path / "a.gz").write_bytes(packed)
    with pytest.raises(DataError, match="damaged gzip"):
        texts_of(TextFile("a.gz", tmp_path / "a.gz"), Reading(), 10)
