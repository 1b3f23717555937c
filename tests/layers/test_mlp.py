"""The FFN: which half is the gate, what backward keeps, where the output norm stands."""

import pytest
import torch
import torch.nn.functional as F

from siamesenorm.layers.mlp import MLP, swiglu
from siamesenorm.residual import NormSpec, SublayerNeeds
from siamesenorm.residual.kernels import native


def test_second_half_is_the_gate():
    x = torch.tensor([[2.0, 3.0, -1.0, 4.0]])
    for grad in (True, False):
        with torch.set_grad_enabled(grad):
            torch.testing.assert_close(swiglu(x), x[:, :2] * x[:, 2:] * torch.sigmoid(x[:, 2:]))


@pytest.mark.skipif(native.library() is None, reason="installed without the compiled kernels")
def test_backward_keeps_the_projection_alone():
    x, kept = torch.randn(5, 8, requires_grad=True), []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t.shape), lambda t: t):
        swiglu(x)
    assert kept == [x.shape]


def test_output_norm_stands_before_the_output_projection():
    mlp = MLP(4, 6, needs=SublayerNeeds(output_norm=True), norm=NormSpec("layer"), activation="gelu", bias=True)
    h = torch.randn(2, 4)
    inner = F.layer_norm(F.gelu(F.linear(h, mlp.up.weight, mlp.up.bias)), (6,))
    torch.testing.assert_close(mlp(h), F.linear(inner, mlp.down.weight, mlp.down.bias))
