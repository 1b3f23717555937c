"""Every topology compiles to one graph that computes the same."""

import pytest
import torch
from torch.testing import assert_close

from .stacks import D, make, randomise
from .table import ROWS

# Options that only change numbers or put compiled parts together again are left out; each graph takes a second.
SAME_GRAPH = {
    "siamese:input_norm=false",
    "siamese:x=post:norm_at=end,y=scaled",
    "siamese:y=reordered",
    "siamese:x=deepnorm,y=sandwich",
    "siamese:x=b2t,y=rezero",
    "siamese:x=hybrid_star,y=subln",
    "siamese:depth_scaling=none",
    "siamese:depth_scaling=sqrt(l+1),final_norm=false",
    "siamese:form=hybrid_pre,input_norm=no,depth_scaling=none",
    "mix",
    "layerscale:start=1",
    "span:branch_std=1/L",
    "span:branch_std=1",
    "hyper:rate=1,dynamic=false",
    "hyper:rate=4,dynamic=false",
    "hyper:rate=1,dynamic=true",
    "mhc:collapse=learned,eps=0",
    "mhc_lite:rate=3",
    "ihc:rate=3",
    "gr:rate=2,rank=3",
    "x0:normed_start=true",
    "attnres:blocks=2",
    "siamese:x=span,y=layerscale:start=0.5",
    "siamese:x=keel,y=peri",
    "siamese:y=gr:rate=2",
    "hyper:rate=2,dynamic=true",
    "hybrid:input_norm=true",
    "mhc:rate=2,sinkhorn_steps=3,eps=0",
}
TWO_BLOCKS = [["attention"], ["ffn"]]  # block 0 and a later one, attention and FFN, in the smallest graph
COMPILED = [row for row in ROWS if row.text not in SAME_GRAPH]


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


@pytest.mark.parametrize("row", COMPILED, ids=lambda row: row.text)
def test_compiles_without_graph_breaks(row):
    assert_compiled_agrees(row.text, "aot_eager")


@pytest.mark.parametrize("text", ["siamese", "siamese:form=hybrid_pre"])
def test_compiles_with_layer_norm(text):
    assert_compiled_agrees(text, "aot_eager", norm="layer")


def test_compiles_with_drop_in_training():
    """Dropout and stochastic depth stay in the one graph; a rate of nearly nothing draws no zeros here."""
    assert_compiled_agrees("siamese", "aot_eager", dropout=1e-9, drop_path=1e-9)
