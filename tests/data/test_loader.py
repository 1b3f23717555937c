"""The loader's state is one number: any resume, any world size, the same samples."""

import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from siamesenorm.data import BatchLoader, DataError, Tokens, TrainingData

DATA = TrainingData(
    [
        Tokens([np.arange(0, 900, dtype="<u2"), np.arange(900, 1000, dtype="<u2")], name="first"),
        Tokens([np.arange(2000, 2500, dtype="<u2")], name="second"),
    ],
    8,
    weights=[0.6, 0.4],
    seed=11,
)
ONE = TrainingData(Tokens([np.arange(1001, dtype="<u2")], name="one"), 10, seed=5)


def take(loader, count):
    with loader:
        return [next(loader)["input_ids"] for _ in range(count)]


def same(left, right):
    return len(left) == len(right) and all(torch.equal(a, b) for a, b in zip(left, right, strict=True))


@given(st.sampled_from([DATA, ONE]), st.integers(0, 40), st.integers(1, 12), st.integers(0, 3), st.integers(0, 3))
def test_resuming_anywhere_gives_the_rest(data, stop, size, before, after):
    whole = take(BatchLoader(data, size, prefetch=before), stop + 5)
    loader = BatchLoader(data, size, prefetch=before)
    take(loader, stop)
    assert loader.sample == stop * size
    assert same(take(BatchLoader(data, size, sample=loader.sample, prefetch=after), 5), whole[stop:])
    assert same(take(loader, 5), whole[stop:])
    state = loader.state_dict()
    loader.seek(0)
    assert same(take(loader, 5), whole[:5])
    loader.load_state_dict(state)
    assert loader.sample == (stop + 5) * size


@given(st.sampled_from([DATA, ONE]), st.sampled_from([1, 2, 3, 4, 6, 12]), st.integers(0, 500))
def test_ranks_together_have_the_global_batch_whatever_their_number(data, world, sample):
    alone = take(BatchLoader(data, 12, sample=sample, prefetch=0), 4)
    ranks = [
        take(BatchLoader(data, 12, rank=rank, world_size=world, sample=sample, prefetch=0), 4) for rank in range(world)
    ]
    assert same([torch.cat(parts) for parts in zip(*ranks, strict=True)], alone)


def test_resuming_at_another_world_size_and_batch_size():
    whole = torch.cat(take(BatchLoader(DATA, 12), 10))
    first = take(BatchLoader(DATA, 12, rank=0, world_size=1), 3)
    rest = [take(BatchLoader(DATA, 6, rank=rank, world_size=3, sample=36), 14) for rank in range(3)]
    joined = [torch.cat(parts) for parts in zip(*rest, strict=True)]
    assert torch.equal(torch.cat([*first, *joined]), whole)


def test_an_epoch_has_every_sequence_once_and_the_next_another_order():
    first, second = (torch.cat(take(BatchLoader(ONE, 20, sample=sample), 5))[:, 0] for sample in (0, 100))
    assert sorted(first.tolist()) == sorted(second.tolist()) == list(range(0, 1000, 10))
    assert not torch.equal(first, second)
    loader = BatchLoader(ONE, 20, sample=130)
    assert loader.epochs() == {"one": 1.3}


def test_reading_ahead_is_bounded_and_ends():
    made = []

    class Slow(TrainingData):
        def batch(self, samples):
            made.append(int(samples[0]))
            return super().batch(samples)

    data = Slow(ONE.corpora, 10, seed=5)
    loader = BatchLoader(data, 4, prefetch=3)
    for _ in range(5):
        next(loader)
    loader.close()
    assert made == sorted(made)
    assert len(made) <= 5 + 3
    assert not [thread for thread in threading.enumerate() if thread.name == "batches"]
    assert loader.sample == 20


def test_errors_of_the_thread_reach_the_reader_again_and_again():
    tokens = Tokens([np.full(100, 60_000, dtype="<u2")], name="bad", vocab_size=10)
    with BatchLoader(TrainingData(tokens, 9), 2) as loader:
        for _ in range(3):
            with pytest.raises(DataError, match="'bad' holds id 60000"):
                next(loader)
        assert loader.sample == 0


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"rank": 2, "world_size": 2}, "rank: 2 is not allowed; with world_size 2 it takes 0 to 1"),
        ({"world_size": 13}, "global_batch_size: 12 is not allowed; it takes world_size 13 or more"),
        ({"sample": -1}, "sample: -1 is not allowed"),
        ({"prefetch": -1}, "prefetch: -1 is not allowed"),
    ],
)
def test_bad_settings_are_said(options, message):
    with pytest.raises(DataError, match=message):
        BatchLoader(DATA, 12, **options)


def test_foreign_states_are_said():
    with pytest.raises(DataError, match="loader state: "):
        BatchLoader(DATA, 12).load_state_dict({"epoch": 1})
