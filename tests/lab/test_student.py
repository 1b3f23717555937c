"""Student's t against printed tables and the closed forms of one and two degrees of freedom."""

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from siamesenorm.lab.report.student import cumulative, holm, paired, quantile

# Two-sided 95 % and 99 % points as every textbook prints them.
TABLE = {1: (12.706, 63.657), 2: (4.303, 9.925), 3: (3.182, 5.841), 4: (2.776, 4.604), 9: (2.262, 3.250)}
TABLE |= {5: (2.571, 4.032), 7: (2.365, 3.499), 10: (2.228, 3.169), 30: (2.042, 2.750), 120: (1.980, 2.617)}


@pytest.mark.parametrize("freedom", TABLE)
def test_quantiles_of_the_printed_table(freedom):
    assert quantile(0.975, freedom) == pytest.approx(TABLE[freedom][0], abs=6e-4)
    assert quantile(0.995, freedom) == pytest.approx(TABLE[freedom][1], abs=6e-4)


@given(st.floats(0.001, 0.999))
def test_one_degree_of_freedom_is_cauchys(probability):
    assert quantile(probability, 1) == pytest.approx(math.tan(math.pi * (probability - 0.5)), rel=1e-6, abs=1e-9)


@given(st.floats(-50, 50))
def test_two_degrees_of_freedom_in_closed_form(t):
    assert cumulative(t, 2) == pytest.approx(0.5 + t / (2 * math.sqrt(2 + t * t)), abs=1e-12)


def test_large_freedom_is_the_normal_distribution():
    assert quantile(0.975, 5001) == pytest.approx(1.959964, abs=1e-3)


def test_interval_by_hand():
    # Mean −0.034, standard deviation 0.0045826, times 4.3027 / sqrt(3).
    found = paired([-0.035, -0.029, -0.038])
    assert found.mean == pytest.approx(-0.034)
    assert found.low == pytest.approx(-0.034 - 4.302653 * 0.00458258 / math.sqrt(3), abs=1e-7)
    assert found.high == pytest.approx(-0.034 + 4.302653 * 0.00458258 / math.sqrt(3), abs=1e-7)
    assert found.p == pytest.approx(0.0060, abs=5e-5)  # t = 12.85 with 2 degrees of freedom


def test_one_difference_has_no_interval():
    found = paired([-0.5])
    assert (found.mean, found.low, found.high, found.p) == (-0.5, None, None, None)


@pytest.mark.parametrize("differences", [[-0.3, 0.1, 0.05], [0.1, 0.2], [-1.0, -0.9, -1.2, -1.1], [0.3, 0.2, 0.31]])
def test_chance_is_below_five_percent_where_the_interval_leaves_out_zero(differences):
    found = paired(differences)
    assert (found.p < 0.05) == (found.low > 0 or found.high < 0)


def test_differences_without_spread():
    assert paired([0.25, 0.25]).p == 0
    assert paired([0.0, 0.0, 0.0]).p == 1


def test_holm_by_hand():
    assert holm([0.01, 0.04, 0.03, 0.005]) == pytest.approx([0.03, 0.06, 0.06, 0.02])
    assert holm([0.04, None, 0.5, 0.9]) == [pytest.approx(0.12), None, 1.0, 1.0]  # what has no chance is none of them
    assert holm([]) == []


def test_of_seven_topologies_that_are_all_alike_one_stands_out_in_one_family_of_twenty():
    chance = random.Random(3)
    found = {"each for itself": 0, "corrected": 0}
    for _ in range(600):
        baseline = [chance.gauss(0, 1) for _ in range(3)]
        chances = [paired([chance.gauss(0, 1) - other for other in baseline]).p for _ in range(7)]
        found["each for itself"] += min(chances) < 0.05
        found["corrected"] += min(holm(chances)) < 0.05
    assert found["each for itself"] > 0.15 * 600
    assert found["corrected"] < 0.07 * 600


@pytest.mark.parametrize(("probability", "freedom"), [(0.0, 3), (1.0, 3), (0.5, 0)])
def test_what_has_no_quantile(probability, freedom):
    with pytest.raises(ValueError, match="not allowed"):
        quantile(probability, freedom)
