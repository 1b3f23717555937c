"""Numbers that are the same but for rounding, which differs from machine to machine and grows with their size."""

import torch

ROUNDING = 1e-5
"""Of float32, over some hundred operations; in units of the largest number compared."""


def assert_same_but_for_rounding(found, expected, tolerance=ROUNDING, *, at_least=0.0):
    """Shapes and dtypes are equal, and no number is off by more than `tolerance` times the largest one expected.

    Lists and dictionaries are compared entry by entry, each tensor at its own scale. Where a tensor may be nothing but
    rounding (the gradient of a key's bias is zero on paper), its scale is `at_least` so much.
    """
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        found, expected = list(found.values()), list(expected.values())
    if isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same_but_for_rounding(one, other, tolerance, at_least=at_least)
        return
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * max(largest(expected), at_least))


def assert_same_gradients(found, expected, tolerance=10 * ROUNDING):
    """Gradients of one loss for many tensors; those far below the largest are compared at a hundredth of it."""
    assert_same_but_for_rounding(found, expected, tolerance, at_least=max(map(largest, expected)) / 100)


def largest(tensor):
    return tensor.detach().abs().max().item() if tensor.numel() else 0.0
