"""What records operators (jit, fx, fake tensors) records every topology as it is: right for other numbers too."""

import pytest
import torch
from torch import nn
from torch._subclasses import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.testing import assert_close

from .stacks import PAIR, D, L, every_graph, make, make_sublayers, randomise
from .table import ROWS

FIRST = list({row.name: row for row in reversed(ROWS)}.values())
every_topology = pytest.mark.parametrize("row", FIRST, ids=[row.text for row in FIRST])
"""As its first row has it: options change numbers, and `test_jit_trace` follows those that do more."""


class Stack(nn.Module):
    """A topology with its sublayers, from a tensor to a tensor."""

    def __init__(self, row):
        super().__init__()
        self.topology = make(row, dtype=torch.float32)
        self.sublayers = make_sublayers([PAIR] * L, dtype=torch.float32)
        randomise(self.topology, 0.2)

    def forward(self, x):
        return self.topology(x, self.sublayers)


def numbers(*shape):
    return torch.randn(*shape, D)


@every_graph
@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_jit_trace(row):
    stack = Stack(row)
    traced = torch.jit.trace(stack, numbers(2, 3), check_trace=False)
    assert "siamesenorm::" not in str(traced.inlined_graph)  # a trace may be loaded where our operators are not
    for x in (numbers(2, 3), numbers(4, 3)):
        assert_close(traced(x), stack(x), rtol=1e-4, atol=1e-4)


@every_topology
def test_make_fx(row):
    stack = Stack(row)
    with torch.no_grad():
        graph = make_fx(stack)(numbers(2, 3))
        x = numbers(2, 3)
        assert_close(graph(x), stack(x), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("text", ["siamese", "hyper"])
def test_make_fx_of_values_and_gradients(text):
    """In `real` mode our operators stand in the graph, in `fake` mode the plain form does."""
    stack = Stack(text)

    def run(x):
        x = x.detach().requires_grad_()
        out = stack(x)
        return out, torch.autograd.grad(out.square().sum(), x)[0]

    for mode in ("real", "fake"):
        graph = make_fx(run, tracing_mode=mode, _allow_non_fake_inputs=True)(numbers(2, 3))
        x = numbers(2, 3)
        assert_close(graph(x), run(x), rtol=1e-4, atol=1e-4)


@every_topology
def test_fake_tensors(row):
    stack, mode = Stack(row), FakeTensorMode(allow_non_fake_inputs=True)
    x = mode.from_tensor(numbers(2, 3).requires_grad_())
    with mode:
        out = stack(x)
        (grad,) = torch.autograd.grad(out.sum(), x)
    assert out.shape == grad.shape == (2, 3, D)
