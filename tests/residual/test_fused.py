"""The fused siamese step inside a stack: taken where it may be, with the plain form's values and gradients."""

import copy

import pytest
import torch
from torch import nn
from torch.testing import assert_close

import siamesenorm.residual.siamese as module
from siamesenorm.residual import Flow, RMSNorm
from siamesenorm.residual.kernels import native

from .stacks import MLP, NORMS, PAIR, D, L, every_norm, gradients, make, make_sublayers, randomise

pytestmark = pytest.mark.skipif(native.library() is None, reason="installed without the compiled kernels")
FORMS = ["siamese", "siamese:form=plain", "siamese:form=hybrid_pre", "siamese:input_norm=false"]
every_form = pytest.mark.parametrize("text", FORMS)
CLOSE = {"rtol": 1e-4, "atol": 1e-4}


def stack(text, norm="rms", fused=True, blocks=L, sublayers=None, **how):
    """A topology, its sublayers and an embedding; the same numbers for either value of `fused`."""
    topology = make(text, blocks, norm=NORMS[norm], fused=fused, dtype=torch.float32, **how)
    sublayers = make_sublayers([PAIR] * blocks, dtype=torch.float32) if sublayers is None else sublayers
    torch.manual_seed(1)
    randomise(topology)
    return topology, sublayers, torch.randn(2, 3, D, requires_grad=True)


@pytest.fixture
def taken(monkeypatch):
    """One entry for every fused step that ran."""
    steps, real = [], module.siamese_step
    monkeypatch.setattr(module, "siamese_step", lambda *args: steps.append(1) or real(*args))
    return steps


def test_the_step_is_taken(taken):
    """In eager mode before any sublayer of the paper's forms; elsewhere the plain form runs."""

    def steps(text, **how):
        taken.clear()
        topology, sublayers, x = stack(text, **how)
        topology(x, sublayers)
        return len(taken)

    assert [steps(text) for text in FORMS] == [2 * L] * len(FORMS)
    assert [steps(text, norm="layer") for text in FORMS] == [2 * L] * len(FORMS)
    assert [steps(text, fused=False) for text in FORMS] == [0] * len(FORMS)
    assert steps("siamese:x=deepnorm") == steps("siamese:y=scaled") == steps("pre") == 0
    assert steps("siamese:x=hybrid_star", blocks=3) == 3  # none within block 0 or out of it
    with native.disabled():
        assert steps("siamese") == 0


@every_form
@every_norm
def test_values_and_gradients_are_the_plain_forms(text, norm, taken):
    topology, sublayers, x = stack(text, norm)
    got = topology(x, sublayers)
    assert len(taken) == 2 * L
    plain, _, x_plain = stack(text, norm, fused=False, sublayers=sublayers)
    expected = plain(x_plain, sublayers)
    assert_close(got, expected, **CLOSE)
    assert_close(gradients(got, x, topology, sublayers), gradients(expected, x_plain, plain, sublayers), **CLOSE)


@every_form
@pytest.mark.parametrize("how", [{"dropout": 0.3}, {"drop_path": 0.4}, {"dropout": 0.2, "drop_path": [0.0, 0.5]}])
def test_one_draw_of_dropout_for_both_streams(text, how, taken):
    results = []
    for fused in (True, False):
        topology, sublayers, x = stack(text, fused=fused, sublayers=[torch.tanh, torch.sin] * L, **how)
        torch.manual_seed(2)
        out = topology.train()(x, sublayers)
        results.append((out, *gradients(out, x, topology)))
    assert taken
    assert_close(*results, **CLOSE)


class Several(nn.Module):
    """Projects h three times, saves it in a product too, and returns a reshaped path through it."""

    def __init__(self, dim):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, h):
        flat = h.reshape(-1, h.shape[-1])
        return (self.q(h) * torch.tanh(self.k(h)) + self.v(flat).view_as(h)) * h


class Turned(MLP):
    """Returns an output that does not lie in one piece."""

    def forward(self, h):
        return super().forward(h).transpose(0, 1).contiguous().transpose(0, 1)


@every_form
@pytest.mark.parametrize("kind", [Several, Turned])
def test_sublayers_that_use_their_input_oddly(text, kind, taken):
    sublayers = nn.ModuleList(kind(D) for _ in range(2 * L))
    results = []
    for fused in (True, False):
        topology, _, x = stack(text, fused=fused, sublayers=sublayers)
        out = topology(x, sublayers)
        results.append((out, *gradients(out, x, topology, sublayers)))
    assert taken
    assert_close(*results, **CLOSE)


@every_form
def test_gradients_twice_through_a_retained_graph(text):
    topology, sublayers, x = stack(text)
    parameters = [x, *topology.parameters(), *sublayers.parameters()]
    out = topology(x, sublayers)
    first = torch.autograd.grad(out.square().sum(), parameters, retain_graph=True)
    second = torch.autograd.grad(out.square().sum(), parameters)
    assert_close(first, second, rtol=0, atol=0)


@every_form
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(text, context, taken):
    topology, sublayers, x = stack(text)
    expected = topology(x, sublayers).detach()
    taken.clear()
    with context():
        out = topology(x, sublayers)
    assert len(taken) == 2 * L
    assert not out.requires_grad
    assert_close(out, expected, **CLOSE)


@every_form
def test_frozen_parts(text):
    """Gradients for the input alone, and for the parameters alone."""
    topology, sublayers, x = stack(text)
    (expected, *others) = torch.autograd.grad(topology(x, sublayers).sum(), [x, *topology.parameters()])
    assert_close(
        torch.autograd.grad(topology(x.detach(), sublayers).sum(), list(topology.parameters())), tuple(others), **CLOSE
    )
    topology.requires_grad_(False)
    assert_close(torch.autograd.grad(topology(x, sublayers).sum(), x)[0], expected, **CLOSE)


@every_form
def test_a_pass_that_stops_and_starts_again(text):
    """Where the fused step is cut in two, nothing changes."""
    topology, sublayers, x = stack(text)
    expected = torch.autograd.grad(topology(x, sublayers).square().sum(), [x, *topology.parameters()])
    streams = topology.open(x)
    for at, sublayer in enumerate(sublayers):
        flow = Flow(topology, streams=streams, at=at)
        flow.through(sublayer)
        streams = flow.streams
    got = torch.autograd.grad(topology.close(streams).square().sum(), [x, *topology.parameters()])
    assert_close(got, expected, **CLOSE)


@every_form
def test_streams_that_broadcast_against_each_other(text):
    results, streams = [], (torch.randn(3, D), torch.randn(1, D))
    for fused in (True, False):
        topology = stack(text, fused=fused, sublayers=[])[0]
        state, h = topology.links[0].read(streams)
        results.append(topology.steps[1](state, torch.tanh(h)))
    assert_close(*results)


@every_form
def test_settings_changed_later_count(text, taken):
    """What a norm or a link is at the time of a call, not what it was when the stack was built."""
    results = []
    for fused in (True, False):
        topology, sublayers, x = stack(text, fused=fused, sublayers=[torch.tanh, torch.sin] * L)
        before = topology(x, sublayers)
        for part in topology.modules():
            if isinstance(part, RMSNorm):
                part.eps = 0.5
        for link in topology.links:
            link.scale = link.scale * 3
        results.append(topology(x, sublayers))
        assert (results[-1] - before).abs().max() > 0.01
    assert taken
    assert_close(*results, **CLOSE)


@every_form
def test_a_copy_has_a_step_of_its_own(text, taken):
    topology, sublayers, x = stack(text)
    expected = topology(x, sublayers)
    other = copy.deepcopy(topology)
    with torch.no_grad():
        for parameter in topology.parameters():
            parameter.zero_()
    taken.clear()
    assert_close(other(x, sublayers), expected)
    assert len(taken) == 2 * L


@every_form
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("autocast", [True, False])
def test_autocast_and_low_precision_agree(text, dtype, autocast):
    results, sublayers = [], make_sublayers([PAIR] * L, dtype=torch.float32 if autocast else dtype)
    for fused in (True, False):
        topology, _, x = stack(text, fused=fused, sublayers=sublayers)
        if not autocast:
            topology, x = topology.to(dtype), x.detach().to(dtype).requires_grad_()
        with torch.autocast("cpu", dtype, enabled=autocast):
            out = topology(x, sublayers)
        results.append((out, *gradients(out.float(), x, topology, sublayers)))
    for mine, theirs in zip(*results, strict=True):
        assert mine.dtype is theirs.dtype
        assert_close(mine, theirs, rtol=0.02, atol=0.02)
