"""Every topology computes its equation: outputs and all gradients agree in float64 with a straight-line loop."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from siamesenorm.residual import TOPOLOGIES, Flow

from .stacks import (
    GRAPHS,
    NORMS,
    PAIR,
    D,
    L,
    by_equation,
    every_row,
    make,
    make_sublayers,
    randomise,
    rebuilt,
    tensors_of,
)
from .table import ROWS

CLOSE = {"rtol": 1e-10, "atol": 1e-10}
LAYOUTS = {
    "attention-only": [["attention"]] * 3,
    "deep": [PAIR] * 4,
    "three": [["attention", "cross_attention", "ffn"]] * 2,
    "uneven": [["attention"], PAIR, ["attention", "cross_attention", "ffn"]],
    "parallel": [["parallel"]] * 3,
}


PAIRS = [
    (row, norm)
    for number, row in enumerate(ROWS)
    for norm in (NORMS if row.name == "siamese" else ["rms", list(NORMS)[1 + number % (len(NORMS) - 1)]])
]
"""Every topology with RMSNorm and with another kind by turns; those that bring kernels of their own with all kinds."""


def assert_agrees(row, norm, blocks):
    topology = make(row, blocks, norm=NORMS[norm])
    randomise(topology)
    sublayers = make_sublayers(blocks)
    parameters = [*topology.parameters(), *sublayers.parameters()]
    x = torch.randn(2, 3, D, dtype=torch.float64, requires_grad=True)
    direction = torch.randn_like(x)

    got, expected = topology(x, sublayers), by_equation(row, topology, norm, blocks, sublayers, x)
    assert_close(got, expected, **CLOSE)
    for mine, theirs in zip(
        *(torch.autograd.grad(y, [x, *parameters], direction) for y in (got, expected)), strict=True
    ):
        assert_close(mine, theirs, **CLOSE)


def test_every_topology_has_a_row():
    assert {row.name for row in ROWS} == set(TOPOLOGIES)


@pytest.mark.parametrize(("row", "norm"), PAIRS, ids=lambda value: getattr(value, "text", value))
def test_outputs_and_gradients_are_the_equations(row, norm):
    assert_agrees(row, norm, [PAIR] * L)


@pytest.mark.parametrize(
    ("row", "layout"),
    [(row, layout) for row in GRAPHS for layout in LAYOUTS if row.parallel or layout != "parallel"],
    ids=lambda value: getattr(value, "text", value),
)
def test_other_block_layouts_follow_the_same_equation(row, layout):
    assert_agrees(row, "rms", LAYOUTS[layout])


@every_row
def test_gradient_reaches_every_parameter(row):
    topology, sublayers = make(row, norm="layer"), make_sublayers([PAIR] * L)
    randomise(topology)
    x = torch.randn(2, 3, D, dtype=torch.float64, requires_grad=True)
    topology(x, sublayers).square().sum().backward()
    for name, parameter in topology.named_parameters():
        assert parameter.grad is not None, name
        reached = parameter.grad.abs() > 1e-12
        if name in row.partly_reached:
            assert reached.any(), name
        else:
            assert reached.all() != (name in row.unreached), name
    assert (x.grad != 0).all()


@every_row
@pytest.mark.parametrize("at", [1, 2, 3])
def test_gradient_reaches_every_stream(row, at):
    topology, sublayers = make(row), make_sublayers([PAIR] * L)
    randomise(topology)
    flow = topology.start(torch.randn(2, 3, D, dtype=torch.float64))
    for sublayer in sublayers[:at]:
        flow.through(sublayer)
    assert tuple(topology.named_streams(flow.streams)) == row.streams_at(at)

    leaves = [t.detach().clone().requires_grad_() for t in tensors_of(flow.streams)]
    flow = Flow(topology, streams=rebuilt(flow.streams, iter(leaves)), at=at)
    for sublayer in sublayers[at:]:
        flow.through(sublayer)
    flow.close().square().sum().backward()
    for number, leaf in enumerate(leaves):
        assert (leaf.grad is None) == (number in row.unread.get(at, ()))
        assert leaf.grad is None or (leaf.grad.abs() > 1e-12).all()


@every_row
@pytest.mark.parametrize(("norm", "per_feature"), [("rms", 1), ("layer", 2), ("rms-free", 0)])
def test_parameter_count(row, norm, per_feature):
    for d, blocks in ((4, 1), (5, 2), (7, 5)):
        count = sum(p.numel() for p in make(row, blocks, d, norm=NORMS[norm]).parameters())
        assert count == row.norms(blocks) * per_feature * d + row.extra(d, blocks)


@every_row
@settings(max_examples=8)
@given(
    batch=st.lists(st.integers(0, 3), max_size=3),
    dim=st.integers(1, 9),
    depth=st.integers(1, 3),
    norm=st.sampled_from(sorted(NORMS)),
    where=st.integers(0, 26),
)
def test_any_shape_is_the_same_map_on_every_vector(row, batch, dim, depth, norm, where):
    """Any number of batch dimensions (none, empty ones), any width, any depth."""
    torch.manual_seed(0)
    topology = make(row, depth, dim, norm=NORMS[norm])
    randomise(topology)
    sublayers = make_sublayers([["ffn", "ffn"]] * depth, dim)
    x = torch.randn(*batch, dim, dtype=torch.float64, requires_grad=True)
    out = topology(x, sublayers)
    assert out.shape == x.shape
    (grad,) = torch.autograd.grad(out.sum(), x)
    if x.numel():
        where %= x.numel() // dim
        one = x.detach().reshape(-1, dim)[where].requires_grad_()
        alone = topology(one, sublayers)
        assert_close(alone, out.reshape(-1, dim)[where], **CLOSE)
        assert_close(torch.autograd.grad(alone.sum(), one)[0], grad.reshape(-1, dim)[where], **CLOSE)
