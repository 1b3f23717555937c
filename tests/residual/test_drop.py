"""Dropout and stochastic depth: one draw a sublayer, for all streams, on the update and nowhere else."""

import pytest
import torch
from torch.testing import assert_close

from siamesenorm.residual.drop import Drop

from .stacks import PAIR, D, L, by_equation, every_graph, make, make_sublayers, randomise

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def random_case(row, batch=8, **how):
    topology, sublayers = make(row, norm="layer", **how), make_sublayers([PAIR] * L)
    randomise(topology)
    return topology, sublayers, torch.randn(batch, 3, D, dtype=torch.float64)


def record_masks(topology):
    """What every link's drop drew for its update."""
    masks = {}

    def noting(k, draw):
        def note(output):
            assert k not in masks, "a second draw for the same sublayer"
            masks[k] = draw(output)
            return masks[k]

        return note

    for k, link in enumerate(topology.links):
        link.drop.forward = noting(k, link.drop.forward)
    return masks


@every_graph
@pytest.mark.parametrize("rates", [{"dropout": 0.4}, {"drop_path": 0.4}, {"dropout": 0.3, "drop_path": [0.2, 0.5]}])
def test_one_draw_feeds_every_stream_where_the_equation_has_its_update(row, rates):
    topology, sublayers, x = random_case(row, **rates)
    masks = record_masks(topology)
    got = topology(x, sublayers)
    assert len(masks) == 2 * L
    assert any((mask == 0).any() for mask in masks.values())
    drops = [lambda update, k=k: update * masks[k] for k in range(2 * L)]
    assert_close(got, by_equation(row, topology, "layer", [PAIR] * L, sublayers, x, drops), **CLOSE)


@every_graph
def test_evaluation_drops_nothing(row):
    topology, sublayers, x = random_case(row, dropout=0.5, drop_path=0.5)
    without = make(row, norm="layer")
    without.load_state_dict(topology.state_dict())
    topology.eval()
    assert_close(topology(x, sublayers), without(x, sublayers), **CLOSE)
    topology.train()
    assert (topology(x, sublayers) - without(x, sublayers)).abs().max() > 1e-3


@pytest.mark.parametrize("text", ["siamese", "siamese:form=plain", "siamese:form=hybrid_pre", "residual_dual"])
@pytest.mark.parametrize("fused", [True, False])
def test_both_streams_lose_the_update_of_the_same_samples(text, fused):
    topology, sublayers, x = random_case(text, batch=32, drop_path=0.5, fused=fused)
    kept = make(text, norm="layer")
    kept.load_state_dict(topology.state_dict())

    def after_two(topology, second):
        """The streams as the third sublayer finds them: the second's write and its read are one fused step."""
        streams, _ = topology.links[1].read(topology.links[0].write(topology.links[0].read(topology.open(x))[0], 0 * x))
        return topology.steps[2](streams, second(x))[0]

    nothing, dropped = after_two(kept, torch.zeros_like), after_two(topology, sublayers[1])
    same_x, same_y = ((a - b).abs().amax((-1, -2)) < 1e-12 for a, b in zip(nothing, dropped, strict=True))
    assert torch.equal(same_x, same_y)
    assert 0 < same_x.sum() < 32


@pytest.mark.parametrize("text", ["sandwich", "peri", "reordered"])
def test_output_norms_run_before_the_drop(text):
    """A norm after the drop would undo its rescaling and give a dropped sample the norm's bias."""
    topology, sublayers, x = random_case(text, batch=32, drop_path=0.5)
    flow = topology.start(x)
    start = flow.streams
    flow.through(sublayers[0])
    update = (flow.streams - start).abs().amax((-1, -2))
    assert 0 < (update == 0).sum() < 32
    full = make(text, norm="layer")
    full.load_state_dict(topology.state_dict())
    flow = full.start(x)
    flow.through(sublayers[0])
    kept = update != 0
    assert_close(update[kept], 2 * (flow.streams - start).abs().amax((-1, -2))[kept], **CLOSE)


def test_drop_keeps_the_mean_and_drops_whole_samples():
    drop = Drop(path=0.25)
    out = drop(torch.ones(4000, 2, 3)).expand(4000, 2, 3)
    assert out.unique().tolist() == pytest.approx([0, 4 / 3])
    assert torch.equal(out.amin((-1, -2)), out.amax((-1, -2)))
    assert out.mean().item() == pytest.approx(1, abs=0.05)
    features = Drop(dropout=0.25)(torch.ones(4000, 2, 3))
    assert (features.amin((-1, -2)) != features.amax((-1, -2))).any()
    assert features.mean().item() == pytest.approx(1, abs=0.05)


def test_drop_path_takes_one_rate_a_block():
    topology = make("siamese", 3, drop_path=[0.0, 0.1, 0.2])
    assert [float(link.drop.path) for link in topology.links] == [0, 0, 0.1, 0.1, 0.2, 0.2]
