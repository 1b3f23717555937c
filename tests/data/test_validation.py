"""Validation: fixed order, every token scored once, over any number of ranks."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from siamesenorm.data import IGNORED, DataError, Tokens, ValidationData

EOS = 5000


def numbered(count, eos_id=EOS):
    return Tokens([np.arange(count, dtype="<u2")], name="numbers", eos_id=eos_id)


def scored(batches):
    pairs = []
    for batch in batches:
        keep = batch["labels"] != IGNORED
        pairs += zip(batch["input_ids"][keep].tolist(), batch["labels"][keep].tolist(), strict=True)
    return pairs


@given(st.integers(1, 70), st.integers(1, 12), st.integers(1, 5), st.integers(1, 4))
def test_every_token_is_scored_once_after_the_one_before_it(count, length, batch_size, world):
    data = ValidationData(numbered(count), length)
    ranks = [list(data.batches(batch_size, rank=rank, world_size=world)) for rank in range(world)]
    assert len({len(batches) for batches in ranks}) == 1
    assert all(batch["labels"].shape == (batch_size, length) for batches in ranks for batch in batches)
    pairs = [pair for step in zip(*ranks, strict=True) for pair in scored(step)]
    assert pairs == [(EOS if label == 0 else label - 1, label) for label in range(count)]
    assert data.scored() == count


def test_without_an_end_the_first_token_is_context_only():
    assert [label for _, label in scored(ValidationData(numbered(10, None), 4).batches(2))] == list(range(1, 10))


def test_masking_leaves_out_first_tokens_only():
    ids = [1, 2, EOS, 3, EOS, 4, 4, EOS]
    tokens = Tokens([np.array(ids, dtype="<u2")], name="ids", eos_id=EOS)
    pairs = scored(ValidationData(tokens, 3, document_masking=True).batches(1))
    assert pairs == [(1, 2), (2, EOS), (3, EOS), (4, 4), (4, EOS)]


def test_a_quick_look_is_the_start():
    quick = ValidationData(numbered(100), 8, sequences=3)
    assert [label for _, label in scored(quick.batches(2))] == list(range(24))
    assert quick.scored() == 24


def test_bad_requests_are_said():
    with pytest.raises(DataError, match="'numbers' has no tokens to validate on"):
        ValidationData(numbered(0), 4)
    with pytest.raises(DataError, match="sequences: 0 is not allowed"):
        ValidationData(numbered(9), 4, sequences=0)
    with pytest.raises(DataError, match="rank = 2 of 2 is not allowed"):
        next(ValidationData(numbered(9), 4).batches(1, rank=2, world_size=2))
