"""What the norms promise beside their equation: float32 inside under autocast, in backward too."""

import torch
import torch.nn.functional as F
from torch.testing import assert_close

from siamesenorm.residual import RMSNorm


def test_backward_inside_autocast_is_not_rounded():
    norm = RMSNorm(64)
    torch.nn.init.normal_(norm.weight)
    x = torch.randn(8, 64, dtype=torch.bfloat16).float().requires_grad_()
    grad = torch.randn(8, 64)
    (expected,) = torch.autograd.grad(F.rms_norm(x, (64,), norm.weight, norm.eps), x, grad)
    with torch.autocast("cpu", torch.bfloat16):
        (got,) = torch.autograd.grad(norm(x), x, grad)
    assert_close(got, expected, rtol=1e-5, atol=1e-5)
