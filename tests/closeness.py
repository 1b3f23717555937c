"""Numbers that are the same but for rounding, which differs from machine to machine and grows with their size."""

import torch

ROUNDING = 1e-5
"""Of float32, over some hundred operations; in units of the largest number compared."""


def assert_same_but_for_rounding(found, expected, tolerance=ROUNDING, *, scale=None):
    """Shapes and dtypes are equal, and no number is off by more than `tolerance` times the largest one expected.

    Lists and dictionaries are compared entry by entry, each tensor at its own scale. Where an entry may be nothing
    but rounding (the gradient of a key's bias is zero on paper), `scale` says what is large.
    """
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        found, expected = list(found.values()), list(expected.values())
    if isinstance(expected, (list, tuple)):
        assert len(found) == len(expected)
        for one, other in zip(found, expected, strict=True):
            assert_same_but_for_rounding(one, other, tolerance, scale=scale)
        return
    size = largest(expected) if scale is None else scale
    torch.testing.assert_close(found, expected, rtol=0, atol=tolerance * size)


def largest(numbers):
    """The largest magnitude of a tensor, or of all tensors in a list or dictionary."""
    if isinstance(numbers, dict):
        numbers = list(numbers.values())
    if isinstance(numbers, (list, tuple)):
        return max(map(largest, numbers))
    return torch.as_tensor(numbers).detach().abs().max().item() if torch.as_tensor(numbers).numel() else 0.0
