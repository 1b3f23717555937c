"""What the norms promise beside their equation: a second derivative, and float32 inside under autocast."""

import pytest
import torch
import torch.nn.functional as F
from torch.testing import assert_close

from siamesenorm.residual import RMSNorm


@pytest.mark.parametrize("affine", [True, False])
def test_rms_norm_is_twice_differentiable(affine):
    norm = RMSNorm(5, affine=affine).double()
    x = torch.randn(3, 5, dtype=torch.float64, requires_grad=True)
    inputs = (x, norm.weight) if affine else (x,)
    assert torch.autograd.gradgradcheck(lambda x, *_: norm(x), inputs)


def test_backward_inside_autocast_is_not_rounded():
    norm = RMSNorm(64)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(8, 64, dtype=torch.bfloat16).float().requires_grad_()
    grad = torch.randn(8, 64)
    (expected,) = torch.autograd.grad(F.rms_norm(x, (64,), norm.weight, norm.eps), x, grad)
    with torch.autocast("cpu", torch.bfloat16):
        (got,) = torch.autograd.grad(norm(x), x, grad)
    assert_close(got, expected, rtol=1e-5, atol=1e-5)
