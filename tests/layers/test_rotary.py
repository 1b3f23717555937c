"""Rotary positions: the angle law, relative position only, and the gradient of plain operators."""

import math

import pytest
import torch

from siamesenorm.layers.rotary import Rotary, rotate, split_and_rotate


def turned_by_hand(x, position, theta):
    """One head vector, pair by pair, with scalar arithmetic."""
    half, out = len(x) // 2, [0.0] * len(x)
    for i in range(half):
        angle = position * theta ** (-2 * i / len(x))
        out[i] = x[i] * math.cos(angle) - x[i + half] * math.sin(angle)
        out[i + half] = x[i + half] * math.cos(angle) + x[i] * math.sin(angle)
    return out


@pytest.mark.parametrize("grad", [True, False])
def test_every_pair_turns_by_its_own_angle(grad):
    x = torch.randn(1, 5, 2, 6)
    positions = torch.tensor([0, 1, 2, 7, 100])
    with torch.set_grad_enabled(grad):
        out = rotate(x, Rotary(500.0).cos_sin(positions, 6))
    for t, position in enumerate(positions.tolist()):
        for head in range(2):
            expected = torch.tensor(turned_by_hand(x[0, t, head].tolist(), position, 500.0))
            torch.testing.assert_close(out[0, t, head], expected, atol=1e-5, rtol=1e-5)


def test_products_depend_on_distance_alone():
    q, k = torch.randn(8), torch.randn(8)

    def product(at_q, at_k):
        cos_sin = Rotary().cos_sin(torch.tensor([at_q, at_k]), 8)
        a, b = rotate(torch.stack([q, k])[None, :, None], cos_sin)[0, :, 0]
        return (a * b).sum()

    torch.testing.assert_close(product(9, 4), product(105, 100), atol=1e-4, rtol=1e-4)
    assert abs(product(9, 4) - product(9, 5)) > 1e-3


def test_positions_may_differ_by_row():
    x = torch.randn(2, 3, 1, 4)
    positions = torch.tensor([[0, 1, 2], [5, 6, 7]])
    both = rotate(x, Rotary().cos_sin(positions, 4))
    for row in range(2):
        torch.testing.assert_close(both[row : row + 1], rotate(x[row : row + 1], Rotary().cos_sin(positions[row], 4)))


def test_split_keeps_values_and_gradients_are_those_of_plain_operators():
    heads, kv_heads, cos_sin = 4, 2, Rotary().cos_sin(torch.arange(5), 6)
    qkv = torch.randn(3, 5, 8, 6, requires_grad=True)
    weights = [torch.randn(3, 5, n, 6) for n in (heads, kv_heads, kv_heads)]

    def loss(parts):
        return sum((part * w).sum() for part, w in zip(parts, weights, strict=True))

    parts = split_and_rotate(qkv, heads, kv_heads, cos_sin)
    torch.testing.assert_close(parts[2], qkv[:, :, 6:])
    (grad,) = torch.autograd.grad(loss(parts), qkv)
    cos, sin = cos_sin
    q, k, v = qkv.split([heads, kv_heads, kv_heads], dim=2)
    plain = [t * cos + torch.cat([t[..., 3:], t[..., :3]], -1) * sin for t in (q, k)]
    (expected,) = torch.autograd.grad(loss([*plain, v]), qkv)
    torch.testing.assert_close(grad, expected)


def test_low_precision_turns_by_float32_angles():
    x = torch.randn(1, 1, 1, 64)
    cos_sin = Rotary().cos_sin(torch.tensor([4097]), 64)
    exact, low = rotate(x.bfloat16().float(), cos_sin), rotate(x.bfloat16(), cos_sin)
    assert low.dtype == torch.bfloat16
    torch.testing.assert_close(low.float(), exact, atol=0.02, rtol=0.01)
