"""The compiled operators of topologies agree with their plain forms, and step aside where these must run."""

import itertools

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from siamesenorm.residual import LayerNorm, RMSNorm
from siamesenorm.residual.kernels import native, siamese_step, sinkhorn
from siamesenorm.residual.kernels.eager import runs_eager
from siamesenorm.residual.kernels.siamese_step import ABSENT, LAYER, RMS

from .stacks import NORMS, make, make_sublayers, randomise

built = pytest.mark.skipif(native.library() is None, reason="installed without the compiled kernels")
CLOSE = {"rtol": 1e-4, "atol": 1e-4}
SHAPES = st.tuples(st.lists(st.integers(0, 5), max_size=3), st.integers(1, 40))
PRESENT = list(itertools.product([False, True], repeat=3))  # N_X, g, N_in


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


def numbers(batch, dim, strided):
    return (torch.randn(*batch, 2 * dim)[..., ::2] if strided else torch.randn(*batch, dim)).requires_grad_()


@built
@settings(max_examples=60)
@given(shape=SHAPES, norm=st.sampled_from(sorted(NORMS)), strided=st.booleans())
def test_norms(shape, norm, strided):
    torch.manual_seed(0)
    (*batch,), dim = shape
    module = NORMS[norm](dim)
    randomise(module)
    assert_kernels_agree(lambda x, *_: module(x), [numbers(batch, dim, strided), *module.parameters()])


@built
@settings(max_examples=60)
@given(
    batch=st.lists(st.integers(0, 20), max_size=2),
    n=st.integers(2, 8),
    rounds=st.integers(1, 25),
    eps=st.sampled_from([0.0, 1e-6, 0.1]),
    strided=st.booleans(),
)
def test_doubly_stochastic_matrices(batch, n, rounds, eps, strided):
    """Against the plain form in float64: the kernel is at most as wrong as float32 is."""
    torch.manual_seed(0)
    logits = numbers(batch, n * n, strided)
    got = with_gradients(lambda x: torch.ops.siamesenorm.sinkhorn(x, rounds, eps), [logits])
    exact = logits.detach().double().requires_grad_()
    expected = with_gradients(lambda x: sinkhorn.plain(x, rounds, eps), [exact])
    assert_close(got, expected, rtol=1e-4, atol=3e-6, check_dtype=False)


@built
def test_matrices_of_many_tokens_do_not_depend_on_threads_and_say_where_a_token_is_not_a_number():
    logits = torch.randn(4097, 16)
    logits[1000, 5] = torch.nan
    made = []
    before = torch.get_num_threads()
    for threads in (1, 2, 3):
        torch.set_num_threads(threads)
        made.append(torch.ops.siamesenorm.sinkhorn(logits, 20, 1e-6))
    torch.set_num_threads(before)
    assert torch.equal(made[0].nan_to_num(7), made[1].nan_to_num(7))
    assert torch.equal(made[0].nan_to_num(7), made[2].nan_to_num(7))
    assert made[0].isnan().any(-1).nonzero().flatten().tolist() == [1000]


@built
@pytest.mark.parametrize(("size", "rounds"), [(5, 3), (0, 3), (16, 0), (16, -1), (16, 1025), (4096, 5)])
def test_matrices_that_are_none_or_too_many_rounds_are_refused(size, rounds):
    with pytest.raises(RuntimeError, match=rf"sinkhorn: {size} logits and {rounds} rounds"):
        torch.ops.siamesenorm.sinkhorn(torch.randn(2, size), rounds, 1e-6)


def test_many_rounds_run_in_the_plain_form():
    logits = torch.randn(2, 16)
    assert_close(sinkhorn.sinkhorn(logits, 1025, 0.0).sum(-1), torch.ones(2, 4))


@built
@settings(max_examples=80)
@given(
    shape=SHAPES,
    norm=st.sampled_from(sorted(NORMS)),
    present=st.sampled_from(PRESENT),
    strided=st.booleans(),
    writes=st.booleans(),
)
def test_siamese_step(shape, norm, present, strided, writes):
    """The operator itself, all three outputs and all gradients, over presence of N_X, g, N_in and O."""
    torch.manual_seed(0)
    (*batch,), dim = shape
    kind = RMS if NORMS[norm].kind == "rms" else LAYER
    kinds = [kind if there else ABSENT for there in (present[0], True, present[2])]
    norms = [NORMS[norm](dim) if k else None for k in kinds]
    vectors = [None if n is None else p for n in norms for p in ((None, None) if n is None else (n.weight, n.bias))]
    vectors.append(torch.nn.Parameter(torch.empty(dim)) if present[1] else None)
    there = [k for k, p in enumerate(vectors) if p is not None]
    tensors = [numbers(batch, dim, strided) for _ in range(3)]
    tensors += [torch.randn(dim, requires_grad=True) for _ in there]

    def run(step, x, y, o, *given):
        parameters = [given[there.index(k)] if k in there else None for k in range(7)]
        next_x, y1, h = step(x, y, o if writes else None, 0.6, tuple(parameters), kinds, [1e-3] * 3)
        return next_x, y1, h, 0 * o  # O has a gradient in any case

    got = with_gradients(lambda *given: run(siamese_step.siamese_step, *given), tensors)
    assert_close(got, with_gradients(lambda *given: run(siamese_step.plain, *given), tensors), **CLOSE)


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
        x = torch.randn(7, 210, 24, requires_grad=True)
        tensors = [x, *topology.parameters()]
        with native.disabled():
            expected = with_gradients(lambda x, *_: topology(x, sublayers), tensors)
        got = with_gradients(lambda x, *_: topology(x, sublayers), tensors)
        assert_close(got, expected, rtol=1e-3, atol=1e-3)
    finally:
        torch.set_num_threads(before)


@built
def test_they_run_for_float32_and_can_be_switched_off(monkeypatch):
    called = []
    real = native.call
    monkeypatch.setattr(native, "call", lambda name, arguments: called.append(name) or real(name, arguments))
    norm = RMSNorm(8)
    norm(torch.randn(2, 8)).sum().backward()
    assert called == ["norm_forward", "norm_backward"]
    with native.disabled():
        norm(torch.randn(2, 8))
    norm(torch.randn(0, 8))
    norm.double()(torch.randn(2, 8, dtype=torch.float64))
    norm.bfloat16()(torch.randn(2, 8, dtype=torch.bfloat16))
    assert called == ["norm_forward", "norm_backward"]


class Subclass(torch.Tensor):
    """A user's own kind of tensor, which operators of ours know nothing of."""


def test_transforms_traces_and_tensors_of_other_kinds_need_the_plain_form():
    x = torch.randn(2)
    assert runs_eager(x, torch.nn.Parameter(x), None)
    assert not runs_eager(x.as_subclass(Subclass))
    seen = []
    look = lambda x: seen.append(runs_eager()) or x.sin()  # noqa: E731
    torch.func.vmap(look)(x)
    torch.func.jvp(look, (x,), (x,))
    torch.func.grad(lambda x: look(x).sum())(x)
    with torch.autograd.forward_ad.dual_level():
        look(x)
    torch.jit.trace(look, x, check_trace=False)
    torch.compile(look, backend="eager")(x)
    assert seen == [False] * 6
    assert runs_eager(x)


@built
def test_a_library_of_another_version_is_left_alone(monkeypatch):
    """After an update without a new build, structures would not be what the kernels take them for."""
    monkeypatch.setattr(native, "VERSION", native.VERSION + 1)
    library, why = native._load.__wrapped__()
    assert library is None
    assert "version" in why


@pytest.mark.parametrize("kind", [RMSNorm, LayerNorm])
@pytest.mark.parametrize("width", [4, 16])
def test_a_row_of_another_width_is_refused(kind, width):
    """Kernels know addresses only: a wrong width must never reach them."""
    with pytest.raises(ValueError, match=f"{width} features where 8 are normalised"):
        kind(8)(torch.randn(2, width))


@pytest.mark.parametrize(
    "weight", [torch.full((1,), 3.0).expand(64), torch.randn(128)[::2]], ids=["expanded", "strided"]
)
def test_gains_that_do_not_lie_in_one_piece(weight):
    x = torch.randn(2, 64)
    got = torch.func.functional_call(RMSNorm(64), {"weight": weight}, (x,))
    assert_close(got, torch.func.functional_call(RMSNorm(64), {"weight": weight.clone()}, (x,)))


@pytest.mark.parametrize("norm", NORMS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_low_precision_is_normalised_in_float32(norm, dtype):
    module = NORMS[norm](32)
    randomise(module)
    x = torch.randn(5, 32).to(dtype)
    got = module(x)
    assert got.dtype is dtype
    assert_close(got, module(x.float()).to(dtype))
    in_low = NORMS[norm](32).to(dtype)
    in_low.load_state_dict(module.state_dict())
    assert in_low(x).dtype is dtype
    assert (in_low(x).float() - got.float()).norm() < 0.01 * got.float().norm()
    with torch.autocast("cpu", dtype):
        assert_close(module(x.float()), module(x.float()), rtol=0, atol=0)
        assert module(x.float()).dtype is torch.float32
