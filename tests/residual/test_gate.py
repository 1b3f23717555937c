"""Gates of a condition: they multiply the update that is added, behind any norm of it, once for all streams."""

import pytest
import torch
from torch.testing import assert_close

from siamesenorm.residual import Flow, Gated
from siamesenorm.residual.base import Step

from .stacks import PAIR, D, L, by_equation, every_graph, make, make_sublayers, randomise

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def random_case(row, **how):
    topology, sublayers = make(row, norm="layer", **how), make_sublayers([PAIR] * L)
    randomise(topology)
    gates = torch.randn(2 * L, 4, 1, D, dtype=torch.float64)
    return topology, sublayers, gates, torch.randn(4, 3, D, dtype=torch.float64, requires_grad=True)


def gated(topology, sublayers, gates, x):
    return topology(x, [lambda h, f=f, g=g: Gated(f(h), g) for f, g in zip(sublayers, gates, strict=True)])


@every_graph
@pytest.mark.parametrize("fused", [True, False])
def test_a_gate_multiplies_what_the_equation_adds(row, fused):
    topology, sublayers, gates, x = random_case(row, fused=fused)
    got = gated(topology, sublayers, gates, x)
    drops = [lambda update, g=g: update * g for g in gates]
    expected = by_equation(row, topology, "layer", [PAIR] * L, sublayers, x, drops)
    assert_close(got, expected, **CLOSE)
    assert_close(torch.autograd.grad(got.square().sum(), x), torch.autograd.grad(expected.square().sum(), x), **CLOSE)


@every_graph
def test_closed_gates_leave_the_sublayers_out(row):
    topology, sublayers, gates, x = random_case(row)
    others = make_sublayers([PAIR] * L)
    assert_close(gated(topology, sublayers, 0 * gates, x), gated(topology, others, 0 * gates, x), **CLOSE)


def test_a_gate_goes_with_dropout():
    topology, sublayers, gates, x = random_case("siamese", drop_path=0.5)
    torch.manual_seed(3)
    got = gated(topology, sublayers, gates, x)
    torch.manual_seed(3)
    flow = Flow(topology, x)
    for sublayer, gate in zip(sublayers, gates, strict=True):
        flow.write(sublayer(flow.read()), gate)
    assert_close(got, flow.close(), **CLOSE)
    topology.eval()
    assert (got - gated(topology, sublayers, gates, x)).abs().max() > 1e-3


@pytest.mark.parametrize(
    "gate", [torch.randn(4, 1, D, dtype=torch.float64), torch.randn(2, 4, 3, D)], ids=["wider dtype", "more rows"]
)
def test_a_gate_that_widens_the_update(gate):
    """The streams become what the plain form makes of them."""
    topology = make("siamese", dtype=torch.float32)
    streams = topology.links[0].read(topology.open(torch.randn(4, 3, D)))[0]
    step, output = topology.steps[1], torch.randn(4, 3, D)
    assert type(step) is not Step
    assert_close(step(streams, output, gate), Step(step.last, step.following)(streams, output, gate))
