"""Trained and foreign tokenizers: reversible, repeatable, and documents end where they should."""

import json

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from siamesenorm.data import DataError, JsonTokenizer, load_tokenizer, save_tokenizer, train_bpe
from siamesenorm.data import bpe as module

pytest.importorskip("tokenizers")
TEXTS = ["the cat sat on the mat\n" * 20, "def f(x):\n    return x + 1\n" * 20, "12 + 34 = 46\n" * 20]
BPE = train_bpe(TEXTS, 280)


@given(st.text())
def test_any_text_comes_back(text):
    assert BPE.decode(BPE.encode(text)) == text


@given(st.lists(st.text(), max_size=6))
def test_documents_are_the_texts_each_with_its_end(texts):
    flat, lengths = BPE.encode_documents(texts)
    assert flat.tolist() == [token for text in texts for token in [*BPE.encode(text), BPE.eos_id]]
    assert np.cumsum(lengths).tolist() == (np.flatnonzero(flat == BPE.eos_id) + 1).tolist()


def test_same_texts_give_the_same_tokenizer():
    assert train_bpe(TEXTS, 280).fingerprint == BPE.fingerprint
    assert train_bpe(TEXTS, 270).fingerprint != BPE.fingerprint


def test_it_learns_to_merge():
    assert BPE.vocab_size == 280
    assert len(BPE.encode(TEXTS[0])) < len(TEXTS[0]) * 0.7


def test_file_gives_the_same_tokenizer_back(tmp_path):
    save_tokenizer(BPE, tmp_path / "tokenizer.json")
    loaded = load_tokenizer(tmp_path)
    assert (loaded.fingerprint, loaded.eos_id, loaded.vocab_size) == (BPE.fingerprint, BPE.eos_id, BPE.vocab_size)


def test_text_that_looks_like_an_end_stays_text():
    assert BPE.eos_id not in BPE.encode("a<|endoftext|>b")
    assert BPE.decode(BPE.encode("a<|endoftext|>b")) == "a<|endoftext|>b"


def test_padding_and_truncation_of_the_file_are_left_out():
    value = json.loads(BPE.to_json())
    value["truncation"] = {"direction": "Right", "max_length": 3, "strategy": "LongestFirst", "stride": 0}
    value["padding"] = {"strategy": {"Fixed": 64}, "direction": "Right", "pad_to_multiple_of": None}
    value["padding"] |= {"pad_id": 1, "pad_type_id": 0, "pad_token": "<|padding|>"}
    strict = JsonTokenizer(json.dumps(value))
    assert strict.encode(TEXTS[0]) == BPE.encode(TEXTS[0])


def test_end_token_can_be_named_and_must_be_there():
    named = JsonTokenizer(BPE.to_json(), eos="<|padding|>")
    assert named.eos_id != BPE.eos_id
    assert named.fingerprint != BPE.fingerprint
    with pytest.raises(DataError, match=r"eos: '<stop>' .*<\|endoftext\|>"):
        JsonTokenizer(BPE.to_json(), eos="<stop>")


def test_long_documents_are_cut_after_lines_and_lose_nothing(monkeypatch):
    monkeypatch.setattr(module, "LONG", 50)
    text = "".join(f"line {number}\n" for number in range(40)) + "x" * 120
    pieces = list(module.cut_long(text))
    assert "".join(pieces) == text
    assert max(map(len, pieces)) <= 50
    assert all(piece.endswith("\n") for piece in pieces[:5])
    flat, lengths = BPE.encode_documents([text, ""])
    assert BPE.decode(flat) == text
    assert lengths[1] == 1


@pytest.mark.parametrize("size", [0, 257, True, 1 << 25])
def test_vocabulary_limits_are_said(size):
    with pytest.raises(DataError, match=r"vocab_size: .* is not allowed; it takes 258"):
        train_bpe(TEXTS, size)


def test_nothing_to_learn_from_is_said():
    with pytest.raises(DataError, match="no document"):
        train_bpe([], 300)
