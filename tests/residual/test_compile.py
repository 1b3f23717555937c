"""Every topology compiles to one graph that computes the same."""

import pytest
import torch
from torch.testing import assert_close

from .stacks import KINDS, SAME_GRAPH, D, make, randomise
from .table import ROWS

TWO_BLOCKS = [["attention"], ["ffn"]]  # block 0 and a later one, attention and FFN, in the smallest graph
COMPILED = [row for row in ROWS if row.text not in SAME_GRAPH]  # each graph takes a second


def assert_compiled_agrees(text, backend, dtype=torch.float64, **how):
    torch._dynamo.reset()
    topology, sublayers = make(text, TWO_BLOCKS, dtype=dtype, **how), [torch.tanh, torch.sin]
    randomise(topology)
    x = torch.randn(2, 3, D, dtype=dtype, requires_grad=True)
    parameters = [x, *topology.parameters()]
    compiled = torch.compile(topology, fullgraph=True, backend=backend)
    got, expected = compiled(x, sublayers), topology(x, sublayers)
    assert_close(got, expected)
    assert_close(
        *(torch.autograd.grad(out.square().sum(), parameters, allow_unused=True) for out in (got, expected)),
    )


def test_every_topology_is_compiled():
    assert {row.name for row in COMPILED} == {row.name for row in ROWS}
    assert {row.text for row in ROWS} >= SAME_GRAPH
    assert {row.text for row in COMPILED} >= KINDS


@pytest.mark.parametrize("row", COMPILED, ids=lambda row: row.text)
def test_compiles_without_graph_breaks(row):
    """With derivatives in a graph too, for each kind of streams; those of the others are autograd's."""
    assert_compiled_agrees(row.text, "aot_eager" if row.text in KINDS else "eager")


@pytest.mark.parametrize("text", ["siamese", "siamese:form=hybrid_pre"])
def test_compiles_with_layer_norm(text):
    assert_compiled_agrees(text, "aot_eager", norm="layer")


def test_compiles_with_drop_in_training():
    """Dropout and stochastic depth stay in the one graph; a rate of nearly nothing draws no zeros here."""
    assert_compiled_agrees("siamese", "aot_eager", dropout=1e-9, drop_path=1e-9)
