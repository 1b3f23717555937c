"""Files from anywhere: JSON, arrays and tensors are read as they are, or refused in one sentence."""

import io
import json
import struct
import zipfile

import numpy as np
import pytest
import torch
from pydantic import BaseModel, ConfigDict
from safetensors.torch import save_file

from siamesenorm.data.arrays import array_header, array_names, map_array, read_array, read_arrays
from siamesenorm.data.reading import MissingError, parse_json, read_bytes, read_json, read_model, read_object, read_text
from siamesenorm.data.tensors import read_tensors
from siamesenorm.errors import DataError

DEEP = 100_000


# JSON --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "text",
    [
        *(
            "",
            "{",
            "[" * DEEP,
            '{"a":' * DEEP,
            "[" * 101 + "]" * 101,
            "NaN",
            "[Infinity]",
            "1e999",
            "9" * 30,
            "9" * 5000,
        ),
        *(b"\xff", '"\\ud800"', '{"\\udfff": 1}', "[1,]", "{1: 2}", b"\x00\x00"),
    ],
    ids=lambda text: str(text[:12]),
)
def test_what_is_no_sound_json_is_a_value_error(text):
    with pytest.raises(ValueError, match=r"^.{1,200}$"):
        parse_json(text)


@pytest.mark.parametrize(
    "value", [None, 0, -1.5, 2**63, "é😀", [[]], {"a": [1, {"b": None}]}, json.loads("[" * 99 + "]" * 99)]
)
def test_sound_json_comes_back(value):
    for ascii_only in (True, False):
        assert parse_json(json.dumps(value, ensure_ascii=ascii_only)) == value
        assert parse_json(json.dumps(value, ensure_ascii=ascii_only).encode()) == value


def test_files_of_others_may_hold_more():
    """Numbers of any size and halves of characters, as in settings of tokenizers and in text to learn from."""
    assert parse_json('[1e999, NaN, "\\ud800"]', strict=False)[0] == float("inf")
    assert parse_json(f'{{"model_max_length": {10**30}}}', strict=False) == {"model_max_length": 10**30}
    with pytest.raises(ValueError, match="nested too deeply"):
        parse_json("[" * DEEP, strict=False)


class Kind(BaseModel):
    model_config = ConfigDict(strict=True)

    count: int


@pytest.mark.parametrize("read", [read_bytes, read_text, read_json, read_object, lambda p, f: read_model(p, Kind, f)])
def test_what_is_no_file_is_one_sentence_with_the_field_and_the_name(read, tmp_path):
    (tmp_path / "folder").mkdir()
    (tmp_path / "file").write_text("text")
    for name, kind in (
        ("nowhere", MissingError),
        ("file/inside", MissingError),
        ("folder", DataError),
        ("a" * 300, DataError),
        ("a\0b", DataError),
        ("\ud800", DataError),
    ):
        with pytest.raises(kind, match=r"^run: '") as caught:
            read(tmp_path / name, "run")
        assert "\n" not in str(caught.value)


def test_a_file_without_end_is_refused(tmp_path):
    (tmp_path / "file").write_bytes(b"x" * 11)
    assert read_bytes(tmp_path / "file", "text", largest=11) == b"x" * 11
    with pytest.raises(DataError, match="too large; it takes up to 10 bytes"):
        read_bytes(tmp_path / "file", "text", largest=10)


def test_values_of_another_kind_are_named_by_their_place(tmp_path):
    for content, message in (
        (b'{"count": "x"}', "is damaged at count"),
        (b"[]", "is damaged at the whole file"),
        (b"{" * 10, "is damaged at the whole file"),
        (b'{"count":' + b"[" * DEEP, "is damaged at the whole file"),
    ):
        (tmp_path / "file").write_bytes(content)
        with pytest.raises(DataError, match=message):
            read_model(tmp_path / "file", Kind, "data")


# Arrays ------------------------------------------------------------------------------------------------


def forged(shape: object, dtype: object = "<u2", body: bytes = b"\1\0" * 8, text: str | None = None) -> bytes:
    header = (text or repr({"descr": dtype, "fortran_order": False, "shape": shape})).encode()
    return b"\x93NUMPY\x01\x00" + struct.pack("<H", len(header)) + header + body


LIES = {
    "terabytes": forged((2**43,)),
    "more than any": forged((2**62, 2**62, 2**62)),
    "a little more": forged((9,)),
    "negative": forged((-8,)),
    "objects": forged((1,), "|O"),
    "a structure": forged((1,), [("a", "<u2")]),
    "nothing at all": forged((2**50,), "|V0"),
    "many dimensions": forged((1,) * 64),
    "no shape": forged("x"),
    "no header": forged(None, text="x"),
    "nested": forged(None, text="(" * 5000),
    "code": forged(None, text="__import__('os').system('true')"),
    "cut": forged((8,))[:20],
    "empty": b"",
    "text": b"text",
}


@pytest.mark.parametrize("lie", LIES)
def test_a_header_that_lies_is_refused_before_memory_is_taken(lie, tmp_path):
    (tmp_path / "array.npy").write_bytes(LIES[lie])
    with zipfile.ZipFile(tmp_path / "arrays.npz", "w") as archive:
        archive.writestr("a.npy", LIES[lie])
    for read in (array_header, map_array, read_array):
        with pytest.raises(DataError, match=r"^image: .*array\.npy' is not a sound NumPy file: "):
            read(tmp_path / "array.npy", "image")
    with pytest.raises(DataError, match=r"^image: .*arrays\.npz' is not a sound NumPy file: "):
        read_arrays(tmp_path / "arrays.npz", ("a",), "image")


@pytest.mark.parametrize(
    "array", [np.arange(6).reshape(2, 3), np.asfortranarray(np.eye(3, 2)), np.zeros((0, 4)), np.uint8(3)]
)
def test_sound_arrays_come_back(array, tmp_path):
    array = np.asarray(array)
    np.save(tmp_path / "array.npy", array)
    for read in (map_array, read_array):
        found = read(tmp_path / "array.npy", "image")
        assert (found.shape, found.dtype) == (array.shape, array.dtype)
        assert np.array_equal(found, array)
    for save in (np.savez, np.savez_compressed):
        save(tmp_path / "arrays.npz", a=array, b=array)
        assert array_names(tmp_path / "arrays.npz") == ["a", "b"]
        (found,) = read_arrays(tmp_path / "arrays.npz", ("a", "c"), "image").values()
        assert found.dtype == array.dtype
        assert np.array_equal(found, array)


def test_a_small_archive_of_a_large_array_is_refused_by_its_size(tmp_path):
    np.savez_compressed(tmp_path / "arrays.npz", a=np.zeros(1 << 20, np.uint8))
    assert (tmp_path / "arrays.npz").stat().st_size < 1 << 14
    with pytest.raises(DataError, match="has 1048576 bytes; it takes up to 1000"):
        read_arrays(tmp_path / "arrays.npz", ("a",), "image", largest=1000)
    np.save(tmp_path / "array.npy", np.zeros(1 << 20, np.uint8))
    with pytest.raises(DataError, match="has 1048576 bytes; it takes up to 1000"):
        read_array(tmp_path / "array.npy", "image", largest=1000)


def test_a_member_whose_checksum_does_not_match_is_refused(tmp_path):
    whole = io.BytesIO()
    np.savez(whole, a=np.arange(100, dtype=np.uint8))
    content = bytearray(whole.getvalue())
    content[content.index(bytes(range(60, 80)))] ^= 1
    (tmp_path / "arrays.npz").write_bytes(content)
    with pytest.raises(DataError, match="is not a sound NumPy file"):
        read_arrays(tmp_path / "arrays.npz", ("a",), "pictures")


# Tensors -----------------------------------------------------------------------------------------------


def test_tensors_come_back_with_their_header(tmp_path):
    save_file({"a": torch.eye(2)}, tmp_path / "file.safetensors", metadata={"task": "language"})
    tensors, header = read_tensors(tmp_path / "file.safetensors", "run")
    assert torch.equal(tensors["a"], torch.eye(2))
    assert header == {"task": "language"}


def test_damaged_tensors_are_one_sentence(tmp_path):
    save_file({"a": torch.eye(2)}, tmp_path / "file.safetensors")
    whole = (tmp_path / "file.safetensors").read_bytes()
    text = json.dumps({"a": {"dtype": "F32", "shape": [2**40], "data_offsets": [0, 2**42]}}).encode()
    for content in (
        b"",
        b"noise",
        whole[:-1],
        whole + b"x",
        struct.pack("<Q", 2**62) + whole[8:],
        struct.pack("<Q", len(text)) + text,
    ):
        (tmp_path / "file.safetensors").write_bytes(content)
        with pytest.raises(DataError, match=r"^run: .* cannot be read: "):
            read_tensors(tmp_path / "file.safetensors", "run")
    for name in ("nowhere", ""):
        with pytest.raises(DataError, match="is not a file"):
            read_tensors(tmp_path / name, "run")
