"""Schedules: closed forms at every step."""

import itertools
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from siamesenorm.train.config import ScheduleConfig
from siamesenorm.train.schedule import lr_factor


def shares(steps: int, **fields) -> list[float]:
    config = ScheduleConfig(**fields)
    return [lr_factor(config, step, steps) for step in range(1, steps + 1)]


def test_warmup_rises_linearly_to_the_peak():
    for kind in ("cosine", "wsd", "constant"):
        assert shares(20, kind=kind, warmup=4)[:4] == [0.25, 0.5, 0.75, 1.0]


def test_cosine():
    got = shares(110, kind="cosine", warmup=10, final=0.1)
    assert got[9] == 1.0
    assert got[59] == pytest.approx(0.55)  # half way: the mean of peak and final share
    assert got[-1] == pytest.approx(0.1)
    for step in range(11, 111):
        assert got[step - 1] == pytest.approx(0.1 + 0.9 * 0.5 * (1 + math.cos(math.pi * (step - 10) / 100)))


def test_wsd_is_flat_and_then_linear():
    got = shares(100, kind="wsd", warmup=10, final=0.0, decay=0.2)
    assert got[9:80] == [1.0] * 71
    assert got[80:] == pytest.approx([1 - k / 20 for k in range(1, 21)])


def test_wsd_decay_never_reaches_into_the_warmup():
    got = shares(10, kind="wsd", warmup=5, final=0.5, decay=1.0)
    assert got == pytest.approx([0.2, 0.4, 0.6, 0.8, 1.0, 0.9, 0.8, 0.7, 0.6, 0.5])


def test_constant_stays_at_the_peak():
    assert shares(10, kind="constant", warmup=0, final=0.1) == [1.0] * 10


@given(
    kind=st.sampled_from(["cosine", "wsd", "constant"]),
    steps=st.integers(1, 300),
    warmup=st.integers(0, 300),
    final=st.floats(0, 1),
    decay=st.floats(0.01, 1),
)
def test_every_share_lies_between_0_and_1_and_falls_after_the_warmup(kind, steps, warmup, final, decay):
    warmup = min(warmup, steps)
    got = shares(steps, kind=kind, warmup=warmup, final=final, decay=decay)
    assert all(0 <= share <= 1 + 1e-12 for share in got)
    after = got[max(warmup - 1, 0) :]
    assert all(later <= earlier + 1e-12 for earlier, later in itertools.pairwise(after))
    if warmup < steps and kind != "constant":
        assert got[-1] == pytest.approx(final)


@pytest.mark.parametrize("step", [0, 11])
def test_steps_outside_are_refused(step):
    with pytest.raises(ValueError, match="1 to 10"):
        lr_factor(ScheduleConfig(), step, 10)
