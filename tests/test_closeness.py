"""Comparisons at scale let rounding through, and nothing else."""

import pytest
import torch

from closeness import assert_same_but_for_rounding, assert_same_gradients

LARGE, SMALL = torch.tensor([1000.0, 1.0]), torch.tensor([1e-9])


def test_rounding_is_relative_to_the_largest_number():
    assert_same_but_for_rounding({"a": [LARGE + 5e-3]}, {"a": [LARGE]})
    with pytest.raises(AssertionError):
        assert_same_but_for_rounding({"a": [LARGE + 5e-2]}, {"a": [LARGE]})
    with pytest.raises(AssertionError):
        assert_same_but_for_rounding([LARGE, SMALL * 1.1], [LARGE, SMALL])
    assert_same_but_for_rounding([LARGE, SMALL * 1.1], [LARGE, SMALL], at_least=1.0)


def test_gradients_that_are_rounding_alone_are_no_difference():
    assert_same_gradients([LARGE, -SMALL], (LARGE, SMALL))
    with pytest.raises(AssertionError):
        assert_same_gradients([LARGE, SMALL + 1e-2], [LARGE, SMALL])


@pytest.mark.parametrize("found", [[LARGE], {"b": LARGE}, LARGE[:1], LARGE.double(), torch.full_like(LARGE, torch.nan)])
def test_other_structures_shapes_types_and_nan_are_differences(found):
    expected = {"a": LARGE} if isinstance(found, dict) else [LARGE, LARGE] if isinstance(found, list) else LARGE
    with pytest.raises(AssertionError):
        assert_same_but_for_rounding(found, expected)
