"""The compiled CPU kernels agree with PyTorch's operators on every norm, shape and stride, and step aside elsewhere."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from siamesenorm.residual import LayerNorm, RMSNorm, native

from .stacks import NORMS, make, make_sublayers, randomise
from .test_fused import PRESENT, step_case

built = pytest.mark.skipif(native.library() is None, reason="installed without the compiled kernels")
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
SHAPES = st.tuples(st.lists(st.integers(0, 5), max_size=3), st.integers(2, 40))


def with_gradients(run, tensors):
    out = run(*tensors)
    out = out if isinstance(out, tuple) else (out,)
    wave = [torch.linspace(-1, 1, t.numel()).view(t.shape) for t in out]  # the same direction for either form
    loss = sum((t * w).sum() for t, w in zip(out, wave, strict=True))
    return [t.detach() for t in out], torch.autograd.grad(loss, tensors)


def assert_kernels_agree(run, tensors):
    with native.disabled():
        expected = with_gradients(run, tensors)
    assert_close(with_gradients(run, tensors), expected, **CLOSE)


@built
@settings(max_examples=60)
@given(shape=SHAPES, norm=st.sampled_from(sorted(NORMS)), strided=st.booleans())
def test_norms(shape, norm, strided):
    torch.manual_seed(0)
    (*batch,), dim = shape
    module = NORMS[norm](dim)
    randomise(module)
    x = torch.randn(*batch, 2 * dim)[..., ::2] if strided else torch.randn(*batch, dim)
    assert_kernels_agree(lambda x, *_: module(x), [x.requires_grad_(), *module.parameters()])


@built
@settings(max_examples=60)
@given(shape=SHAPES, norm=st.sampled_from(sorted(NORMS)), present=st.sampled_from(PRESENT), strided=st.booleans())
def test_fused_step(shape, norm, present, strided):
    torch.manual_seed(0)
    (*batch,), dim = shape
    fused, _, tensors = step_case(norm, present, torch.float32, batch, dim)
    if strided:
        tensors[:3] = [torch.randn(*batch, 2 * dim)[..., ::2].requires_grad_() for _ in range(3)]
    assert_kernels_agree(fused, tensors)


@built
@pytest.mark.parametrize("threads", [1, 2])
@pytest.mark.parametrize("text", ["siamese", "siamese:form=hybrid_pre", "pre"])
def test_a_model_of_many_rows(text, threads):
    """Sums over rows are shared out between threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        topology = make(text, 2, 24, torch.float32, norm="layer" if text == "pre" else "rms")
        sublayers = make_sublayers([["attention", "ffn"]] * 2, 24, torch.float32)
        randomise(topology)
        x = torch.randn(7, 33, 24, requires_grad=True)
        tensors = [x, *topology.parameters()]
        with native.disabled():
            expected = with_gradients(lambda x, *_: topology(x, sublayers), tensors)
        got = with_gradients(lambda x, *_: topology(x, sublayers), tensors)
        assert_close(got, expected, rtol=1e-3, atol=1e-4)
    finally:
        torch.set_num_threads(before)


@built
def test_they_run_for_float32_and_can_be_switched_off(monkeypatch):
    called = []
    real = native.call
    monkeypatch.setattr(native, "call", lambda name, arguments: called.append(name) or real(name, arguments))
    norm = RMSNorm(8)
    norm(torch.randn(2, 8))
    assert called == ["norm_forward"]
    with native.disabled():
        norm(torch.randn(2, 8))
    norm.double()(torch.randn(2, 8, dtype=torch.float64))
    norm.bfloat16()(torch.randn(2, 8, dtype=torch.bfloat16))
    assert called == ["norm_forward"]


@built
def test_a_library_of_another_version_is_left_alone(monkeypatch):
    """After an update without a new build, structures would not be what the kernels take them for."""
    monkeypatch.setattr(native, "VERSION", native.VERSION + 1)
    assert native.library.__wrapped__() is None


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
@pytest.mark.parametrize("width", [4, 16])
def test_a_row_of_another_width_is_refused(kind, width):
    """Kernels know addresses only: a wrong width must never reach them."""
    with pytest.raises(RuntimeError, match=r"shape|size"):
        kind(8)(torch.randn(2, width))


@pytest.mark.parametrize(
    "weight", [torch.full((1,), 3.0).expand(64), torch.randn(128)[::2]], ids=["expanded", "strided"]
)
def test_gains_that_do_not_lie_in_one_piece(weight):
    x = torch.randn(2, 64)
    got = torch.func.functional_call(RMSNorm(64), {"weight": weight}, (x,))
    assert_close(got, torch.func.functional_call(RMSNorm(64), {"weight": weight.clone()}, (x,)))


def test_streams_that_broadcast_against_each_other():
    topology, sublayers = make("siamese", 1, 8, torch.float32), make_sublayers([["ffn", "ffn"]], 8, torch.float32)
    streams = torch.randn(3, 8), torch.randn(1, 8)
    results = []
    for fused in (True, False):
        topology.fused = fused
        state, h = topology.links[0].read(streams)
        results.append(topology.step(0, state, sublayers[0](h)))
    assert_close(results[0], results[1])
