"""The fused siamese step: the plain form's values and gradients, with less kept for backward."""

import itertools

import pytest
import torch
from siamesenorm.residual.fused.siamese import fused_step
from torch import nn
from torch.testing import assert_close

from siamesenorm.residual import Flow

from .stacks import MLP, NORMS, PAIR, D, L, every_norm, make, make_sublayers, randomise

FORMS = ["siamese", "siamese:form=plain", "siamese:form=hybrid_pre", "siamese:input_norm=false"]
every_form = pytest.mark.parametrize("text", FORMS)
CLOSE = {"rtol": 1e-10, "atol": 1e-10}
PRESENT = list(itertools.product([False, True], repeat=3))  # N_X, g, N_in


def step_case(norm, present, dtype=torch.float64, shape=(2, 3), dim=5):
    """The step's tensors, and the step itself in fused and in plain form."""
    norm_x, norm_y, norm_in = (
        NORMS[norm](dim).to(dtype) if there else None for there in (present[0], True, present[2])
    )
    gain = nn.Parameter(torch.randn(dim, dtype=dtype)) if present[1] else None
    modules = nn.ModuleList(module for module in (norm_x, norm_y, norm_in) if module is not None)
    randomise(modules)
    tensors = [torch.randn(*shape, dim, dtype=dtype, requires_grad=True) for _ in range(3)]
    scale = 0.6

    def fused(x, y, o, *_):
        return fused_step(x, y, o, scale, norm_x, gain, norm_y, norm_in)

    def plain(x, y, o, *_):
        x, y = x + scale * o, y + o
        x = x if norm_x is None else norm_x(x)
        s = (x if gain is None else gain * x) + norm_y(y)
        return x, y, s if norm_in is None else norm_in(s)

    return fused, plain, [*tensors, *modules.parameters(), *([] if gain is None else [gain])]


@every_norm
@pytest.mark.parametrize(
    "present", PRESENT, ids=lambda p: "-".join(n for n, on in zip(("X", "g", "in"), p, strict=True) if on) or "Y"
)
def test_gradcheck(norm, present):
    fused, plain, tensors = step_case(norm, present, shape=(2,), dim=3)
    assert_close(fused(*tensors), plain(*tensors), **CLOSE)
    assert torch.autograd.gradcheck(fused, tensors)


@every_norm
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_step_agrees_in_lower_precision(norm, dtype):
    fused, plain, tensors = step_case(norm, (True, True, True), dtype, (16, 4), 32)
    results, directions = [], [torch.randn_like(t) for t in tensors[:3]]
    for step in (fused, plain):
        out = step(*tensors)
        assert {t.dtype for t in out} == {dtype}
        results.append([*out, *torch.autograd.grad(out, tensors, directions)])
    tolerance = 1e-5 if dtype == torch.float32 else 0.03
    for mine, theirs in zip(*results, strict=True):
        assert mine.dtype == dtype
        assert (mine - theirs).float().norm() <= tolerance * theirs.float().norm() + tolerance


def model_case(text, norm="rms", dtype=torch.float64, fused=True, blocks=L, sublayers=None, **how):
    topology = make(text, blocks, norm=NORMS[norm], fused=fused, dtype=dtype, **how)
    sublayers = make_sublayers([PAIR] * blocks, dtype=dtype) if sublayers is None else sublayers
    torch.manual_seed(1)
    randomise(topology)
    x = torch.randn(2, 3, D, dtype=dtype, requires_grad=True)
    return topology, sublayers, x


def both_gradients(text, sublayers, run=lambda topology, x, sublayers: topology(x, sublayers), **how):
    """Gradients of input, topology and sublayers: fused under `run`, and of the plain form."""
    for fused in (True, False):
        topology, _, x = model_case(text, fused=fused, sublayers=sublayers, **how)
        parameters = [x, *topology.parameters(), *nn.ModuleList(sublayers).parameters()]
        out = run(topology, x, sublayers) if fused else topology(x, sublayers)
        yield torch.autograd.grad(out.square().sum(), parameters)


def assert_same(pair, **tolerance):
    mine, theirs = pair
    assert_close(mine, theirs, **(tolerance or CLOSE))


def test_the_step_is_taken(monkeypatch):
    """In eager mode between any two sublayers of the paper's forms; elsewhere the plain form runs."""
    import siamesenorm.residual.siamese as module

    taken = []
    real = module.fused_step
    monkeypatch.setattr(module, "fused_step", lambda *args: taken.append(1) or real(*args))

    def steps(text, **how):
        taken.clear()
        topology, sublayers, x = model_case(text, **how)
        topology(x, sublayers)
        return len(taken)

    assert [steps(text) for text in FORMS] == [2 * L - 1] * len(FORMS)
    assert [steps(text, fused=False) for text in FORMS] == [0] * len(FORMS)
    assert steps("siamese:x=deepnorm") == steps("siamese:y=scaled") == steps("pre") == 0
    assert steps("siamese:x=hybrid_star", blocks=3) == 3  # none within block 0 or out of it


@every_form
@every_norm
def test_autocast_agrees(text, norm):
    topology, sublayers, x = model_case(text, norm, torch.float32)
    outs = []
    for fused in (True, False):
        topology.fused = fused
        with torch.autocast("cpu", torch.bfloat16):
            out = topology(x, sublayers)
        parameters = [x, *topology.parameters(), *sublayers.parameters()]
        outs.append([out, *torch.autograd.grad(out.float().square().sum(), parameters)])
    for mine, theirs in zip(*outs, strict=True):
        assert mine.dtype == theirs.dtype
        assert (mine - theirs).norm() < 0.05 * theirs.norm() + 1e-3


class Twisted(MLP):
    """Changes what it sees in place before it is projected."""

    def forward(self, h):
        h.mul_(1.5).add_(0.25)
        return super().forward(h)


class Several(nn.Module):
    """Projects h three times, saves it in a product too, and returns a reshaped path through it."""

    def __init__(self, dim):
        super().__init__()
        self.q, self.k, self.v = (nn.Linear(dim, dim) for _ in range(3))

    def forward(self, h):
        flat = h.reshape(-1, h.shape[-1])
        return (self.q(h) * torch.tanh(self.k(h)) + self.v(flat).view_as(h)) * h


@every_form
@pytest.mark.parametrize("kind", [Twisted, Several, MLP])
def test_sublayers_that_use_their_input_oddly(text, kind):
    sublayers = nn.ModuleList(kind(D) for _ in range(2 * L)).double()
    # the plain form hands out streams that autograd keeps, so it gets a copy to twist
    plain = [lambda h, F=F: F(h.clone()) for F in sublayers]
    results = []
    for fused in (True, False):
        topology, _, x = model_case(text, fused=fused, sublayers=sublayers)
        start = [lambda h: sublayers[0](h.clone()), *sublayers[1:]]
        out = topology(x, start if fused else plain)
        results.append(torch.autograd.grad(out.square().sum(), [x, *topology.parameters(), *sublayers.parameters()]))
    assert_same(results)


@every_form
def test_gradients_twice_through_a_retained_graph(text):
    topology, sublayers, x = model_case(text, sublayers=nn.ModuleList(Several(D) for _ in range(2 * L)).double())
    parameters = [x, *topology.parameters(), *sublayers.parameters()]
    out = topology(x, sublayers)
    few = torch.autograd.grad(out.sum(), [sublayers[1].q.weight, sublayers[2].v.weight], retain_graph=True)
    first = torch.autograd.grad(out.square().sum(), parameters, retain_graph=True)
    second = torch.autograd.grad(out.square().sum(), parameters)
    assert_close(first, second, rtol=0, atol=0)
    assert_same(both_gradients(text, sublayers))
    again = topology(x, sublayers)
    assert_close(few, torch.autograd.grad(again.sum(), [sublayers[1].q.weight, sublayers[2].v.weight]), **CLOSE)


@every_form
@pytest.mark.parametrize("context", [torch.no_grad, torch.inference_mode])
def test_without_gradients(text, context):
    topology, sublayers, x = model_case(text)
    expected = topology(x, sublayers).detach()
    with context():
        out = topology(x, sublayers)
    assert not out.requires_grad
    assert_close(out, expected, **CLOSE)


@every_form
def test_torch_func_transforms_take_the_plain_form(text):
    topology, sublayers, x = model_case(text)

    def loss(x, parameters):
        return torch.func.functional_call(topology, parameters, (x, sublayers)).square().sum()

    parameters = {name: p.detach() for name, p in topology.named_parameters()}
    grads = torch.func.grad(loss, argnums=1)(x.detach(), parameters)
    out = topology(x, sublayers)
    expected = torch.autograd.grad(out.square().sum(), list(topology.parameters()))
    assert_close(list(grads.values()), list(expected), **CLOSE)
    jacobian = torch.func.jacrev(lambda x: topology(x, sublayers).sum((0, 1)))(x.detach())
    (row,) = torch.autograd.grad(topology(x, sublayers)[..., 1].sum(), x)
    assert_close(jacobian[1], row, **CLOSE)
    each = torch.func.vmap(lambda x: topology(x, sublayers))(x.detach())
    assert_close(each, out, **CLOSE)


@every_form
def test_frozen_parts(text):
    """Gradients for the input alone, and for the parameters alone."""
    topology, sublayers, x = model_case(text)
    (expected, *others) = torch.autograd.grad(topology(x, sublayers).sum(), [x, *topology.parameters()])
    assert_close(
        torch.autograd.grad(topology(x.detach(), sublayers).sum(), list(topology.parameters())), tuple(others), **CLOSE
    )
    topology.requires_grad_(False)
    sublayers.requires_grad_(False)
    assert_close(torch.autograd.grad(topology(x, sublayers).sum(), x)[0], expected, **CLOSE)


@every_form
def test_streams_by_hand_and_a_pass_that_restarts(text):
    """Where the fused step is cut in two, nothing changes."""
    topology, sublayers, x = model_case(text)
    expected = torch.autograd.grad(topology(x, sublayers).square().sum(), [x, *topology.parameters()])
    streams = topology.open(x)
    for at, sublayer in enumerate(sublayers):
        flow = Flow(topology, streams=streams, at=at)
        flow.through(sublayer)
        streams = flow.streams
    got = torch.autograd.grad(topology.close(streams).square().sum(), [x, *topology.parameters()])
    assert_close(got, expected, **CLOSE)
