"""The order of samples is a permutation an epoch, a pure function of (seed, k), and mixes by weight."""

from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from siamesenorm.data import DataError, Order, shuffled
from siamesenorm.data.order import SLOTS

SIZES = st.one_of(st.integers(1, 40), st.integers(1, 5000))


@given(SIZES, st.integers(), st.integers(0, 2**20))
def test_every_epoch_has_every_item_once(size, seed, epoch):
    found = shuffled(np.arange(epoch * size, (epoch + 1) * size), size, seed)
    assert np.array_equal(np.sort(found), np.arange(size))


@given(st.integers(1, 2**45), st.integers(0, 2**63 - 1), st.lists(st.integers(0, 2**50), min_size=1, max_size=20))
def test_a_sample_depends_on_nothing_but_seed_and_number(size, seed, samples):
    together = shuffled(np.array(samples), size, seed)
    alone = [int(shuffled(np.array([sample]), size, seed)[0]) for sample in samples]
    assert together.tolist() == alone
    assert all(0 <= item < size for item in alone)


def test_epochs_and_seeds_differ():
    first, second = (shuffled(np.arange(epoch * 1000, (epoch + 1) * 1000), 1000, 1) for epoch in (0, 1))
    other = shuffled(np.arange(1000), 1000, 2)
    for order in (second, other):
        assert (order == first).mean() < 0.01


def test_small_sets_reach_every_order_evenly():
    size, epochs = 4, 24_000
    orders = shuffled(np.arange(size * epochs), size, 7).reshape(epochs, size)
    counts = Counter(map(tuple, orders.tolist()))
    assert len(counts) == 24
    assert max(counts.values()) < 1.2 * epochs / 24
    assert min(counts.values()) > 0.8 * epochs / 24


def test_neighbours_are_torn_apart_evenly():
    size = 100_003
    order = shuffled(np.arange(size), size, 3)
    steps = np.diff(order) % size
    assert np.abs(np.corrcoef(np.arange(size), order)[0, 1]) < 0.02
    histogram, _ = np.histogram(steps, bins=50, range=(0, size))
    expected = (size - 1) / 50
    assert ((histogram - expected) ** 2 / expected).sum() < 95  # chi-square, 49 degrees, far beyond p = 0.0001


def test_without_weights_the_corpora_are_one():
    order = Order([7, 13, 1], seed=2)
    for epoch in range(3):
        corpora, sequences = order.locate(np.arange(epoch * 21, (epoch + 1) * 21))
        found = sorted(zip(corpora.tolist(), sequences.tolist(), strict=True))
        assert found == [(c, s) for c, size in enumerate([7, 13, 1]) for s in range(size)]
    assert order.epochs(42) == [2.0, 2.0, 2.0]


WEIGHTS = st.lists(st.floats(0.01, 1), min_size=2, max_size=5)


@given(WEIGHTS, st.integers(0, 1000))
def test_shares_are_exact_every_round_and_near_in_between(weights, seed):
    order = Order([50] * len(weights), weights, seed=seed)
    corpora, _ = order.locate(np.arange(2 * SLOTS))
    for part in (corpora[:SLOTS], corpora[SLOTS:]):
        shares = np.bincount(part, minlength=len(weights)) / SLOTS
        assert np.abs(shares - np.array(weights) / sum(weights)).max() <= 1 / SLOTS
    first = np.bincount(corpora[:1000], minlength=len(weights)) / 1000
    assert np.abs(first - np.array(weights) / sum(weights)).max() < 0.08


def test_a_weighted_corpus_goes_through_its_own_epochs():
    sizes, weights = [70, 1300], [0.25, 0.75]
    order = Order(sizes, weights, seed=4)
    corpora, sequences = order.locate(np.arange(3 * SLOTS))
    for number, size in enumerate(sizes):
        mine = sequences[corpora == number]
        whole = mine.size // size
        counts = np.bincount(mine, minlength=size)
        assert counts.min() >= whole
        assert counts.max() <= whole + 1
    for samples in (0, 1, 777, SLOTS, 2 * SLOTS + 5):
        seen = np.bincount(corpora[:samples], minlength=2)
        assert order.epochs(samples) == [seen[0] / 70, seen[1] / 1300]


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        ([1.0], "1 given for 2 corpora"),
        ([1.0, 0.0], "0.0 is not allowed; a weight is a number above 0"),
        ([1.0, -1.0], "-1.0 is not allowed"),
        ([1.0, float("nan")], "nan is not allowed"),
        ([1.0, float("inf")], "inf is not allowed"),
        ([1.0, 1e-7], "1e-07 is not allowed; a weight is at least 1/10000"),
    ],
)
def test_bad_weights_are_said(weights, message):
    with pytest.raises(DataError, match=message):
        Order([5, 5], weights)
