"""Every topology as models run it: saved, built on meta, decoded, checkpointed, in autocast, with masks."""

import io

import pytest
import torch
from torch import nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

from siamesenorm.residual import Flow, NormSpec, Residual

from .stacks import PAIR, D, L, every_graph, gradients, make, make_sublayers, randomise, tensors_of

CLOSE = {"rtol": 1e-10, "atol": 1e-10}


def random_case(row, shape=(2, 5), dtype=torch.float64, **how):
    topology, sublayers = make(row, dtype=dtype, **how), make_sublayers([PAIR] * L, dtype=dtype)
    randomise(topology)
    return topology, sublayers, torch.randn(*shape, D, dtype=dtype, requires_grad=True)


@every_graph
def test_state_dict_round_trip(row):
    topology, sublayers, x = random_case(row, norm="layer")
    file = io.BytesIO()
    torch.save(topology.state_dict(), file)
    file.seek(0)
    fresh = make(row, norm="layer")
    assert not torch.equal(fresh(x, sublayers), topology(x, sublayers))
    fresh.load_state_dict(torch.load(file, weights_only=True))
    assert torch.equal(fresh(x, sublayers), topology(x, sublayers))


@every_graph
def test_meta_construction_then_reset_is_fresh_construction(row):
    with torch.device("meta"):
        inside = Residual(row.text, D, L, norm="layer")
    by_argument = Residual(row.text, D, L, norm="layer", device="meta")
    fresh = Residual(row.text, D, L, norm="layer")
    torch.manual_seed(0)
    fresh.reset_parameters()
    expected = fresh.state_dict()
    for topology in (inside, by_argument):
        assert all(tensor.is_meta for tensor in topology.state_dict().values())
        topology.to_empty(device="cpu")
        with torch.no_grad():
            for parameter in topology.parameters():
                parameter.fill_(float("nan"))  # what to_empty may leave behind
        torch.manual_seed(0)
        topology.reset_parameters()
        assert_close(topology.state_dict(), expected, rtol=0, atol=0)


@every_graph
def test_decoding_token_by_token_is_the_full_sequence(row):
    """The only memory is the sublayers' own cache."""
    topology, sublayers, x = random_case(row)
    topology.eval()
    full = topology(x, sublayers)
    caches = [{} for _ in sublayers]
    tokens = []
    for token in x.split(1, dim=-2):
        flow = topology.start(token)
        for place, sublayer, cache in zip(topology.places, sublayers, caches, strict=True):
            flow.through(sublayer, **({"cache": cache} if place.is_attention else {}))
        tokens.append(flow.close())
    assert_close(torch.cat(tokens, dim=-2), full, **CLOSE)
    assert (full - topology(x.flip(-2), sublayers).flip(-2)).abs().max() > 1e-6  # the order matters to this stack


@every_graph
def test_checkpointed_sublayers_give_the_same_gradients(row):
    topology, sublayers, x = random_case(row)
    expected = gradients(topology(x, sublayers), x, topology, sublayers)
    wrapped = [lambda h, F=F: checkpoint(F, h, use_reentrant=False) for F in sublayers]
    assert_close(gradients(topology(x, wrapped), x, topology, sublayers), expected, **CLOSE)


@every_graph
def test_checkpointed_blocks_give_the_same_gradients(row):
    """A block restarts the pass from its streams: Flow(topology, streams=..., at=...)."""
    topology, sublayers, x = random_case(row)
    expected = gradients(topology(x, sublayers), x, topology, sublayers)

    def block(streams, at):
        flow = Flow(topology, streams=streams, at=at)
        flow.through(sublayers[at])
        flow.through(sublayers[at + 1])
        return flow.streams

    streams = topology.open(x)
    for at in range(0, 2 * L, 2):
        streams = checkpoint(block, streams, at, use_reentrant=False)
    assert_close(gradients(topology.close(streams), x, topology, sublayers), expected, **CLOSE)


@every_graph
def test_autocast_agrees_and_keeps_streams_in_float32(row):
    topology, sublayers, x = random_case(row, dtype=torch.float32)
    expected = topology(x, sublayers)
    expected_grads = gradients(expected, x, topology)
    with torch.autocast("cpu", torch.bfloat16):
        flow = topology.start(x)
        for sublayer in sublayers:
            flow.through(sublayer)
            assert {t.dtype for t in tensors_of(flow.streams)} == {torch.float32}
        out = flow.close()
    assert (out.float() - expected).norm() < 0.05 * expected.norm()
    got_grads = gradients(out.float(), x, topology)
    mine, theirs = (torch.cat([g.flatten() for g in grads]) for grads in (got_grads, expected_grads))
    assert mine.dtype == torch.float32
    assert (mine - theirs).norm() < 0.1 * theirs.norm()


@every_graph
def test_autocast_does_not_round_the_streams(row):
    """What flows past the sublayers keeps float32's precision, mixing of rows included."""
    topology, _, x = random_case(row, dtype=torch.float32)
    expected = topology(x, [torch.zeros_like] * (2 * L))
    with torch.autocast("cpu", torch.bfloat16):
        flow = topology.start(x)
        for _ in range(2 * L):
            flow.through(torch.zeros_like)
        got = flow.close()
    if "dynamic=true" in row.text or "gr" in row.text:  # the connections themselves come from a projection
        assert (got - expected).norm() / expected.norm() < 0.01
    else:
        assert_close(got, expected, rtol=1e-5, atol=1e-5)


@every_graph
def test_sublayers_take_arguments_and_return_tuples(row):
    topology, sublayers, x = random_case(row)
    mask, shift = torch.rand(2, 5, 1, dtype=torch.float64), torch.randn(D, dtype=torch.float64)
    conditioned = [lambda h, mask, *, shift, F=F: (F(h) * mask + shift, "weights") for F in sublayers]
    closed = [lambda h, F=F: F(h) * mask + shift for F in sublayers]
    expected = topology(x, closed)
    assert_close(topology(x, conditioned, mask, shift=shift), expected, **CLOSE)
    flow = topology.start(x)
    results = [flow.through(F, mask, shift=shift) for F in conditioned]
    assert {result[1] for result in results} == {"weights"}
    assert_close(flow.close(), expected, **CLOSE)


@every_graph
def test_read_and_write_by_hand_is_the_same_pass(row):
    """The loop of the library's docstring, the Flow by hand, and `forward`."""
    topology, sublayers, x = random_case(row)
    expected = topology(x, sublayers)
    flow, streams = topology.start(x), topology.open(x)
    for link, sublayer in zip(topology.links, sublayers, strict=True):
        flow.write(sublayer(flow.read()))
        streams, h = link.read(streams)
        streams = link.write(streams, sublayer(h))
    assert_close(flow.close(), expected, **CLOSE)
    assert_close(topology.close(streams), expected, **CLOSE)


@every_graph
def test_looking_at_streams_between_sublayers_changes_nothing(row):
    topology, sublayers, x = random_case(row)
    flow = topology.start(x)
    for sublayer in sublayers:
        flow.through(sublayer)
        named = topology.named_streams(flow.streams)
        assert tuple(named) == row.streams_at(flow.index)
        assert {stream.shape for stream in named.values()} == {x.shape}
    assert_close(flow.close(), topology(x, sublayers), **CLOSE)


@every_graph
def test_bfloat16_parameters_and_streams(row):
    topology, sublayers, x = random_case(row, dtype=torch.float32)
    expected = topology(x, sublayers)
    topology.bfloat16(), sublayers.bfloat16()
    out = topology(x.bfloat16(), sublayers)
    assert out.dtype == torch.bfloat16
    assert (out.float() - expected).norm() / expected.norm() < 0.1
    assert all(g.isfinite().all() for g in gradients(out.float(), x, topology))


class OwnNorm(nn.Module):
    """A user's norm: not one of the library's."""

    def __init__(self, dim):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(dim))

    def forward(self, x):
        return self.scale * x / (1e-5 + x.square().mean(-1, keepdim=True)).sqrt()


@every_graph
def test_norms_of_the_users_own(row):
    topology, like = make(row, norm=OwnNorm), make(row, norm=NormSpec("rms"))
    sublayers, x = make_sublayers([PAIR] * L), torch.randn(2, 3, D, dtype=torch.float64)
    assert_close(topology(x, sublayers), like(x, sublayers), **CLOSE)


@pytest.mark.parametrize("text", ["siamese", "siamese:form=hybrid_pre", "pre", "hyper", "mhc"])
def test_a_pass_split_between_processes_or_stages_continues(text):
    """Streams handed over at every place give what one pass gives."""
    topology, sublayers, x = random_case(text)
    expected = topology(x, sublayers)
    for cut in range(1, 2 * L):
        first = topology.start(x)
        for sublayer in sublayers[:cut]:
            first.through(sublayer)
        second = Flow(topology, streams=first.streams, at=cut)
        for sublayer in sublayers[cut:]:
            second.through(sublayer)
        assert_close(second.close(), expected, **CLOSE)
