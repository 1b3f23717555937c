"""The chunked loss equals F.cross_entropy in value and gradients, and never holds all logits."""

import pytest
import torch
import torch.nn.functional as F
from torch.utils._python_dispatch import TorchDispatchMode

from siamesenorm.layers.cross_entropy import linear_cross_entropy


def make(tokens=23, dim=8, vocabulary=31, ignored=4, dtype=torch.float32):
    hidden = torch.randn(tokens, dim, dtype=dtype, requires_grad=True)
    weight = torch.randn(vocabulary, dim, dtype=dtype, requires_grad=True)
    labels = torch.randint(vocabulary, (tokens,))
    labels[:ignored] = -100
    return hidden, weight, labels


@pytest.mark.parametrize("chunk", [None, 1, 5, 23])
@pytest.mark.parametrize("reduction", ["mean", "sum"])
@pytest.mark.parametrize("scale", [1.0, 0.3])
def test_equals_the_plain_loss(chunk, reduction, scale):
    hidden, weight, labels = make()
    plain = F.cross_entropy(hidden @ weight.T, labels, reduction=reduction)
    expected = torch.autograd.grad(plain * scale, (hidden, weight))
    loss = linear_cross_entropy(hidden, weight, labels, reduction=reduction, chunk=chunk)
    torch.testing.assert_close(loss, plain, atol=1e-6, rtol=1e-6)
    for grad, other in zip(torch.autograd.grad(loss * scale, (hidden, weight)), expected, strict=True):
        torch.testing.assert_close(grad, other, atol=2e-6, rtol=1e-5)


def test_z_loss():
    hidden, weight, labels = make(dtype=torch.float64)
    logits = hidden @ weight.T
    z = logits.logsumexp(-1)[labels != -100].square().mean()
    plain = F.cross_entropy(logits, labels) + 0.01 * z
    loss = linear_cross_entropy(hidden, weight, labels, z_weight=0.01, chunk=6)
    torch.testing.assert_close(loss, plain)
    expected = torch.autograd.grad(plain, (hidden, weight))
    for grad, other in zip(torch.autograd.grad(loss, (hidden, weight)), expected, strict=True):
        torch.testing.assert_close(grad, other)


def test_huge_logits_stay_finite():
    hidden, weight, labels = make()
    loss = linear_cross_entropy(hidden * 1e4, weight, labels)
    torch.testing.assert_close(loss, F.cross_entropy(hidden * 1e4 @ weight.T, labels), atol=1e-2, rtol=1e-6)
    assert all(g.isfinite().all() for g in torch.autograd.grad(loss, (hidden, weight)))


def test_no_labels_at_all_is_zero_loss_and_zero_gradient():
    hidden, weight, labels = make(ignored=23)
    loss = linear_cross_entropy(hidden, weight, labels)
    assert loss.item() == 0
    assert all(g.abs().sum() == 0 for g in torch.autograd.grad(loss, (hidden, weight)))


def test_frozen_head_and_frozen_body():
    hidden, weight, labels = make()
    expected = torch.autograd.grad(F.cross_entropy(hidden @ weight.T, labels), (hidden, weight))
    (only_hidden,) = torch.autograd.grad(linear_cross_entropy(hidden, weight.detach(), labels), hidden)
    (only_weight,) = torch.autograd.grad(linear_cross_entropy(hidden.detach(), weight, labels), weight)
    torch.testing.assert_close(only_hidden, expected[0], atol=2e-6, rtol=1e-5)
    torch.testing.assert_close(only_weight, expected[1], atol=2e-6, rtol=1e-5)


def test_autocast_multiplies_in_low_precision_and_sums_in_float32():
    hidden, weight, labels = make(tokens=64, ignored=0)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        loss = linear_cross_entropy(hidden, weight, labels, chunk=16)
    assert loss.dtype == torch.float32
    torch.testing.assert_close(loss, F.cross_entropy(hidden @ weight.T, labels), atol=0.05, rtol=0.02)
    grads = torch.autograd.grad(loss, (hidden, weight))
    assert [g.dtype for g in grads] == [torch.float32, torch.float32]


class Largest(TorchDispatchMode):
    """Notes the largest tensor that any operator makes."""

    numel = 0

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, torch.Tensor):
                self.numel = max(self.numel, tensor.numel())
        return out


def test_never_holds_all_logits():
    tokens, dim, vocabulary, chunk = 512, 4, 300, 32
    hidden, weight, labels = make(tokens, dim, vocabulary)
    with Largest() as largest:
        linear_cross_entropy(hidden, weight, labels, chunk=chunk).backward()
    assert chunk * vocabulary <= largest.numel < 2 * chunk * vocabulary
    with Largest() as plain:
        F.cross_entropy(hidden @ weight.T, labels).backward()
    assert plain.numel == tokens * vocabulary


def test_bad_input_is_named():
    hidden, weight, labels = make()
    with pytest.raises(ValueError, match=r"reduction: 'none' is not allowed; it takes mean or sum"):
        linear_cross_entropy(hidden, weight, labels, reduction="none")
    with pytest.raises(ValueError, match=r"labels: shape \(22,\) does not fit"):
        linear_cross_entropy(hidden, weight, labels[1:])
