"""Blends: Pre-Norm exactly at b = 0 and the other topology exactly at b = 1, whatever that is; b is kept."""

import pytest
import torch
from torch.testing import assert_close

from siamesenorm.residual import TOPOLOGIES, Residual, TopologyError
from siamesenorm.residual.ramp import Growing, Share

from .stacks import PAIR, D, make, make_sublayers, randomise

BLOCKS = 3


def blended(name, **options):
    blend, pre, other = make("blend", BLOCKS, to=name, steps=10, **options), make("pre", BLOCKS), make(name, BLOCKS)
    for part, whole in ((blend.source, pre), (blend.target, other)):
        randomise(whole, 0.2)
        ends = {key: value for key, value in whole.state_dict().items() if not key.startswith("links.")}
        part.load_state_dict(ends)
    for link, old, new in zip(blend.links, pre.links, other.links, strict=True):
        link.source.load_state_dict(old.state_dict())
        link.target.load_state_dict(new.state_dict())
    return blend, pre, other


@pytest.mark.parametrize("name", TOPOLOGIES)
def test_it_is_pre_norm_at_first_and_the_other_at_last(name):
    blend, pre, other = blended(name)
    sublayers, x = make_sublayers([PAIR] * BLOCKS), torch.randn(2, 5, D, dtype=torch.float64)
    for step, whole in ((1, pre), (11, other), (10**6, other)):
        blend.set_step(step)
        assert torch.equal(blend(x, sublayers), whole(x, sublayers))
    blend.set_step(6)
    flow = blend.start(x)
    for sublayer in sublayers:
        before = flow.streams
        flow.through(sublayer)
    seen = blend.links[-1].summands(before, blend.links[-2])
    assert_close(sum(seen.parts), blend.links[-1].read(before)[1])
    assert len(seen.parts) == len(blend.named_streams(before))
    assert_close(sum(blend.summands_at_end(flow.streams, blend.links[-1]).parts), flow.close())
    half = blend(x, sublayers)
    assert not torch.equal(half, other(x, sublayers)) or name == "pre"
    half.square().mean().backward()
    trained = [name for name, p in blend.named_parameters() if p.grad is not None and p.grad.any()]
    assert any("source" in name for name in trained)
    assert any("target" in name for name in trained)


def test_b_rises_behind_its_start_and_is_kept():
    blend = make("blend", 1, to="post", steps=4, start=100)
    found = []
    for step in (1, 101, 102, 103, 105, 106):
        blend.set_step(step)
        found.append(float(blend.links[1].share()))
        assert float(blend.share()) == found[-1]
    assert found == [0, 0, 0.25, 0.5, 1, 1]
    blend.set_step(103)
    other = make("blend", 1, to="post", steps=4, start=100)
    other.load_state_dict(blend.state_dict())
    assert float(other.links[0].share()) == float(other.share()) == 0.5


def test_norms_inside_sublayers_grow_in_with_it():
    residual = Residual("blend:to=hybrid,steps=4", 16, 1, dtype=torch.float64)
    norms = residual.attention_norms(residual.places[0], 8, 2)
    q, k, v = torch.randn(3, 5, 2, 8, dtype=torch.float64)
    norms.double()
    residual.set_step(1)
    assert all(map(torch.equal, norms(q, k, v), (q, k, v)))
    residual.set_step(5)
    assert_close(norms(q, k, v)[2].square().mean(-1), torch.ones(5, 2, dtype=torch.float64), rtol=1e-3, atol=0)
    had = Residual("blend:to=hybrid,steps=4,qk_norm=head", 16, 1)
    norms = had.attention_norms(had.places[0], 8, 2)
    assert [isinstance(norm, Growing) for norm in (norms.q, norms.k, norms.v)] == [False, False, True]


def test_what_it_cannot_be_is_one_sentence():
    for options, words in (
        ({"to": "blend"}, "takes topologies without prores"),
        ({"to": "post:prores=9"}, "takes topologies without prores"),
        ({"to": "nothing"}, "unknown name"),
        ({"to": "post", "prores": 3}, "takes topologies without prores"),
        ({"to": "reordered", "qk_norm": "head"}, "cannot become"),
        ({"steps": 0}, "steps = 0 is not allowed"),
    ):
        with pytest.raises(TopologyError, match=words):
            Residual("blend", 16, 2, **options)
    assert Residual("blend:to=siamese:form=hybrid_pre;final_norm=false", 16, 2).target.final_norm is None


def test_a_share_leaves_either_end_as_it_is():
    share, old, new = Share(0, 2), torch.randn(8), torch.full((8,), 1e30)
    for step, expected in ((1, old), (3, new)):
        share.set_step(step)
        assert torch.equal(share.blend(old, new), expected)
