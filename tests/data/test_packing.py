"""Batches: labels follow inputs, documents do not see each other, corpora keep to themselves."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from siamesenorm.data import IGNORED, ByteTokenizer, DataError, Tokens, TrainingData, attention_mask, tokens_in_memory

EOS = 9


def corpus(ids, **options):
    return Tokens([np.array(ids, dtype="<u2")], name="ids", **{"eos_id": EOS} | options)


STREAMS = st.lists(st.sampled_from([1, 2, 3, EOS]), min_size=5, max_size=60)


@given(STREAMS, st.integers(1, 4))
def test_labels_follow_inputs_and_an_epoch_has_every_label_once(ids, length):
    data = TrainingData(corpus(range(len(ids)), eos_id=None), length, seed=1)
    batch = data.batch(np.arange(len(data)))
    assert torch.equal(batch["labels"], batch["input_ids"] + 1)
    assert sorted(batch["labels"].flatten().tolist()) == list(range(1, len(data) * length + 1))
    assert all(values.dtype == torch.int64 and values.is_contiguous() for values in batch.values())


@given(STREAMS, st.integers(1, 16))
def test_masking_against_a_plain_loop(ids, length):
    if len(ids) <= length:
        return
    batch = TrainingData(corpus(ids), length, document_masking=True).batch(np.arange(3))
    plain = TrainingData(corpus(ids), length).batch(np.arange(3))
    assert torch.equal(batch["input_ids"], plain["input_ids"])
    for row in range(3):
        document = position = 0
        for place in range(length):
            token = int(batch["input_ids"][row, place])
            assert int(batch["document_ids"][row, place]) == document
            assert int(batch["positions"][row, place]) == position
            expected = IGNORED if token == EOS else int(plain["labels"][row, place])
            assert int(batch["labels"][row, place]) == expected
            document, position = (document + 1, 0) if token == EOS else (document, position + 1)


def test_an_end_is_predicted_but_predicts_nothing():
    batch = TrainingData(corpus([1, 2, EOS, 3, 4, EOS, 1]), 6, document_masking=True).batch(np.arange(1))
    assert batch["labels"].tolist() == [[2, EOS, IGNORED, 4, EOS, IGNORED]]
    assert batch["positions"].tolist() == [[0, 1, 2, 0, 1, 2]]
    assert batch["document_ids"].tolist() == [[0, 0, 0, 1, 1, 1]]


def test_attention_mask_is_causal_within_documents():
    mask = attention_mask(torch.tensor([[0, 0, 1, 1]]))
    assert mask.shape == (1, 1, 4, 4)
    expected = [[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]
    assert mask[0, 0].int().tolist() == expected


def test_mixture_has_its_shares_and_the_sequences_of_each_corpus():
    low, high = corpus([1] * 1000), corpus([2] * 5000)
    batch = TrainingData([low, high], 10, weights=[3, 1], seed=3).batch(np.arange(10_000))
    first = batch["input_ids"][:, 0]
    assert (batch["input_ids"] == first[:, None]).all()
    assert (first == 1).sum() == 7500
    both = TrainingData([low, high], 10, seed=3)
    counts = both.batch(np.arange(len(both)))["input_ids"][:, 0].bincount()
    assert counts.tolist() == [0, 99, 499]
    assert both.epochs(len(both) // 2)["ids"] == pytest.approx(0.5)


def test_narrow_and_wide_corpora_mix():
    wide = Tokens([np.array([70_000] * 50, dtype="<u4")], name="wide")
    batch = TrainingData([corpus([1] * 50), wide], 7).batch(np.arange(14))
    assert set(batch["input_ids"].flatten().tolist()) == {1, 70_000}


def test_bad_corpora_are_said():
    with pytest.raises(DataError, match="'ids' has 4 tokens; a sequence_length of 4 needs at least 5"):
        TrainingData(corpus([1] * 4), 4)
    with pytest.raises(DataError, match="sequence_length: 0 is not allowed"):
        TrainingData(corpus([1] * 4), 0)
    with pytest.raises(DataError, match="no corpus given"):
        TrainingData([], 4)
    with pytest.raises(DataError, match=r"document_masking: needs one eos_id"):
        TrainingData([corpus([1] * 9), corpus([1] * 9, eos_id=None)], 4, document_masking=True)
    with pytest.raises(DataError, match="different tokenizers"):
        TrainingData([corpus([1] * 9, fingerprint="a"), corpus([1] * 9, fingerprint="b")], 4)
    with pytest.raises(DataError, match="holds no document"):
        tokens_in_memory([], ByteTokenizer(), "none")
