"""Grafts: topologies set to compute Pre-Norm do so, and from there every stream and new parameter is trained."""

import pytest
import torch
from torch.testing import assert_close

from siamesenorm.errors import NotExact
from siamesenorm.residual import TOPOLOGIES, NormSpec, TopologyError
from siamesenorm.residual.grafts import EXACT, compute_pre_norm, embedding_factor, eps_for, exact_names, graft_text

from .stacks import PAIR, D, make, make_sublayers, randomise

BLOCKS = 3
TEXTS = [
    *exact_names(),
    "siamese:depth_scaling=none",
    "siamese:form=hybrid_pre",
    "siamese:input_norm=false",
    "siamese:form=hybrid_pre,input_norm=false,final_norm=false",
    "attnres:blocks=0",
    "attnres:blocks=0,sum=true",
    "gr:rate=2",
    "ihc:rate=3",
    "hyper:rate=4,dynamic=false",
    "mhc:collapse=learned",
    "layerscale:prores=100",
]
SCALE_FREE = {"mhc": 2e-4}  # its eps is in the matrices too


def pre_norm(norm, blocks=BLOCKS):
    pre = make("pre", blocks, norm=norm)
    randomise(pre, 0.3)
    return pre, [link.norm for link in pre.links], pre.final_norm


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize("text", TEXTS)
def test_the_function_stays_the_same(text, kind):
    norm = NormSpec(kind, eps=1e-30)
    pre, norms, final = pre_norm(norm)
    grafted, sublayers = make(text, BLOCKS, norm=norm), make_sublayers([PAIR] * BLOCKS)
    randomise(grafted)
    if kind == "layer" and text.startswith("gr"):
        with pytest.raises(TopologyError, match="RMSNorm"):
            compute_pre_norm(grafted, norms, final)
        return
    compute_pre_norm(grafted, norms, final)
    x = torch.randn(2, 5, D, dtype=torch.float64)
    close = SCALE_FREE.get(text.partition(":")[0], 1e-9)
    assert_close(grafted(x * embedding_factor(grafted), sublayers), pre(x, sublayers), rtol=close, atol=close)


@pytest.mark.parametrize("kind", ["rms", "layer"])
@pytest.mark.parametrize(
    "text", ["siamese", "siamese:depth_scaling=none", "gr", "dense", "attnres", "attnres:blocks=0"]
)
def test_a_large_eps_counts_as_it_did(text, kind):
    """Streams as small as a small embedding is: what eps adds is most of their mean square."""
    if kind == "layer" and text == "gr":
        return
    text = graft_text(text)
    pre, norms, final = pre_norm(NormSpec(kind, eps=1e-2))
    eps = eps_for(make(text, BLOCKS), 1e-2)
    grafted, sublayers = make(text, BLOCKS, norm=NormSpec(kind, eps=eps)), make_sublayers([PAIR] * BLOCKS)
    compute_pre_norm(grafted, norms, final)
    x = 0.1 * torch.randn(2, 5, D, dtype=torch.float64)
    assert_close(grafted(x, sublayers), pre(x, sublayers), rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize(
    ("asked", "made"),
    [
        ("attnres", "attnres:sum=true"),
        ("attnres:blocks=2", "attnres:blocks=2,sum=true"),
        ("attnres:sum=false,blocks=0", "attnres:sum=false,blocks=0"),
        ("siamese:form=post_pre", "siamese:form=post_pre"),
    ],
)
def test_grafts_choose_the_options_that_let_a_topology_compute_pre_norm(asked, made):
    assert graft_text(asked) == made


@pytest.mark.parametrize("text", TEXTS)
def test_from_there_streams_come_apart_and_new_parameters_move(text):
    torch.manual_seed(0)
    norm = NormSpec("rms")
    _, norms, final = pre_norm(norm, 4)
    grafted, sublayers = make(text, 4, norm=norm), make_sublayers([PAIR] * 4)
    compute_pre_norm(grafted, norms, final)
    before = {name: p.detach().clone() for name, p in grafted.named_parameters()}
    x, target = torch.randn(2, 4, 5, D, dtype=torch.float64)
    optimizer = torch.optim.AdamW([*grafted.parameters(), *sublayers.parameters()], lr=0.01, weight_decay=0)
    for _ in range(10):
        optimizer.zero_grad()
        (grafted(x, sublayers) - target).square().mean().backward()
        optimizer.step()
    still = {name for name, p in grafted.named_parameters() if torch.equal(p, before[name])}
    assert not still
    flow = grafted.start(x)
    for sublayer in sublayers:
        flow.through(sublayer)
    rows = [row / row.norm() for row in grafted.named_streams(flow.streams).values()]
    assert (
        min([(a - b).norm() for i, a in enumerate(rows) for b in rows[:i]], default=1) > 1e-4
    )  # gr's rows are written alike at first


@pytest.mark.parametrize("name", sorted(set(TOPOLOGIES) - {t.name for t in EXACT}))
def test_others_are_refused_by_name(name):
    _, norms, final = pre_norm(NormSpec("rms"))
    with pytest.raises(TopologyError, match=f"{name}: no setting is known"):
        compute_pre_norm(make(name, BLOCKS), norms, final)


def test_forms_of_siamese_without_an_exact_setting_are_refused():
    _, norms, final = pre_norm(NormSpec("rms"))
    for options, words in (
        ({"form": "plain"}, "seen raw"),
        ({"x": "deepnorm"}, "seen raw"),
        ({"y": "gr"}, "takes pre"),
    ):
        with pytest.raises(NotExact, match=words):
            compute_pre_norm(make("siamese", BLOCKS, **options), norms, final)


@pytest.mark.parametrize("name", sorted(set(exact_names()) - {"gr", "scaled"}))
def test_gated_norms_keep_their_gates(name):
    norm = NormSpec("gated", eps=1e-30)
    pre, norms, final = pre_norm(norm)
    grafted, sublayers = make(name, BLOCKS, norm=norm), make_sublayers([PAIR] * BLOCKS)
    carried = compute_pre_norm(grafted, norms, final)
    x = torch.randn(2, 5, D, dtype=torch.float64)
    close = SCALE_FREE.get(name, 1e-9)
    assert_close(grafted(x * embedding_factor(grafted), sublayers), pre(x, sublayers), rtol=close, atol=close)
    assert set(carried.values()) == set(pre.parameters())
    assert all(torch.equal(there, here) for there, here in carried.items())
