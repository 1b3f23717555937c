"""The byte tokenizer loses nothing, and its file means the same to other libraries."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from siamesenorm.data import ByteTokenizer, DataError, load_tokenizer, save_tokenizer
from siamesenorm.data.tokenizer import token_dtype

BYTE = ByteTokenizer()


@given(st.binary())
def test_any_bytes_come_back(raw):
    assert BYTE.decode_bytes(BYTE.encode(raw)) == raw


@given(st.text())
def test_any_text_comes_back(text):
    assert BYTE.decode(BYTE.encode(text)) == text


@given(st.lists(st.text(), max_size=8))
def test_documents_are_the_texts_each_with_its_end(texts):
    flat, lengths = BYTE.encode_documents(texts)
    expected = [token for text in texts for token in [*BYTE.encode(text), BYTE.eos_id]]
    assert flat.tolist() == expected
    assert lengths.tolist() == [len(text.encode()) + 1 for text in texts]
    assert flat.dtype == np.dtype("<u2")


def test_text_never_makes_a_special_token():
    assert max(BYTE.encode("<|endoftext|><|padding|>")) < 256


def test_specials_are_left_out_of_text():
    assert BYTE.decode([72, 256, 105, 257]) == "Hi"


def test_ids_beyond_the_vocabulary_are_refused():
    with pytest.raises(DataError, match="0 to 257"):
        BYTE.decode([258])


@given(st.text())
def test_half_a_pair_is_refused(text):
    with pytest.raises(DataError, match="surrogate"):
        BYTE.encode(text + "\ud800")


def test_file_gives_the_same_tokenizer_back(tmp_path):
    save_tokenizer(BYTE, tmp_path / "tokenizer.json")
    for name in (tmp_path, tmp_path / "tokenizer.json", "byte"):
        loaded = load_tokenizer(name)
        assert isinstance(loaded, ByteTokenizer)
        assert loaded.fingerprint == BYTE.fingerprint


@given(st.text())
def test_file_means_the_same_to_tokenizers(text):
    tokenizers = pytest.importorskip("tokenizers")
    other = tokenizers.Tokenizer.from_str(BYTE.to_json())
    other.encode_special_tokens = True
    assert other.encode(text, add_special_tokens=False).ids == BYTE.encode(text)
    assert other.token_to_id(BYTE.eos_token) == BYTE.eos_id
    assert other.get_vocab_size() == BYTE.vocab_size
    assert other.decode(BYTE.encode(text)) == text


def test_smallest_type_that_holds_the_vocabulary():
    assert token_dtype(1 << 16) == np.dtype("<u2")
    assert token_dtype((1 << 16) + 1) == np.dtype("<u4")


@pytest.mark.parametrize(
    ("name", "eos", "message"),
    [
        ("bite", None, "tokenizer: 'bite' is not known; allowed are byte"),
        ("byte", "</s>", "eos: '</s>' is not allowed"),
    ],
)
def test_bad_names_are_said(name, eos, message):
    with pytest.raises(DataError, match=message):
        load_tokenizer(name, eos)


@pytest.mark.parametrize("content", [b"{}", b"not json", b"\xff\xfe", b'{"model": 3}', b"[]", b""])
def test_bad_files_are_said(tmp_path, content):
    path = tmp_path / "tokenizer.json"
    path.write_bytes(content)
    with pytest.raises(DataError, match=r"tokenizer: .*tokenizer\.json"):
        load_tokenizer(path)
