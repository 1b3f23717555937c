"""ProRes: on every topology an update is multiplied by min(t / (T l), 1), wherever the equation has its update."""

import warnings

import pytest
import torch
from torch._dynamo.utils import counters
from torch.testing import assert_close

from siamesenorm import Residual
from siamesenorm.residual import UnmetNeedsWarning

from .stacks import PAIR, D, by_equation, every_graph, make, make_sublayers, randomise

T, BLOCKS = 10, 3


@every_graph
@pytest.mark.parametrize("step", [1, 15, 40])
def test_updates_grow_in_block_by_block(row, step):
    topology, sublayers = make(row, BLOCKS, prores=T), make_sublayers([PAIR] * BLOCKS)
    randomise(topology)
    topology.set_step(step)
    factors = [min(step / (T * (k // 2 + 1)), 1.0) for k in range(2 * BLOCKS)]
    drops = [lambda update, factor=factor: update * factor for factor in factors]
    x = torch.randn(2, 3, D, dtype=torch.float64)
    expected = by_equation(row, topology, "rms", [PAIR] * BLOCKS, sublayers, x, drops)
    assert_close(topology(x, sublayers), expected, rtol=1e-6, atol=1e-6)  # the factors are held in float32


def test_checkpoints_keep_the_factors():
    topology = make("siamese", prores=T)
    topology.set_step(7)
    state = topology.state_dict()
    other = make("siamese", prores=T)
    other.load_state_dict(state)
    assert [float(link.ramp.value) for link in other.links] == pytest.approx([0.7, 0.7, 0.35, 0.35])
    assert not any("ramp" in name for name in make("siamese").state_dict())


def test_training_without_steps_is_said_once():
    topology, sublayers = make("pre", prores=T), make_sublayers([PAIR] * 2)
    x = torch.randn(2, D, dtype=torch.float64)
    with pytest.warns(UnmetNeedsWarning, match="set_step"):
        topology(x, sublayers)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        topology(x, sublayers)
        stepped = make("pre", prores=T)
        stepped.set_step(1)
        stepped(x, sublayers)
        make("pre", prores=T).eval()(x, sublayers)


def test_steps_do_not_compile_again():
    torch._dynamo.reset()
    counters.clear()
    topology = make("siamese", prores=T)
    compiled = torch.compile(topology, backend="eager", fullgraph=True)
    x, outputs = torch.randn(2, D, dtype=torch.float64), []
    for step in (1, 5, 50):
        topology.set_step(step)
        outputs.append(compiled(x, [torch.tanh] * 4))
        assert_close(outputs[-1], topology(x, [torch.tanh] * 4))
    assert counters["stats"]["unique_graphs"] == 1
    assert (outputs[0] - outputs[1]).abs().max() > 1e-3


def test_factors_are_made_on_meta_as_elsewhere():
    topology = Residual("pre:prores=10", D, 2, device="meta")
    topology.to_empty(device="cpu")
    topology.reset_parameters()
    assert all(float(link.ramp.value) == 0 for link in topology.links)
