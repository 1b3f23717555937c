"""Run by test_triton.py in a process of its own: the Triton kernels in Triton's interpreter, on CPU tensors.

They take the place of the operators' CPU kernels, so that autograd, opcheck and whole stacks reach them.
"""

import itertools

import pytest
import torch
from torch.testing import assert_close

from siamesenorm.residual.kernels import (
    devices,
    native,
    rms_norm,
    siamese_step,
    triton_norm,
    triton_rows,
    triton_siamese,
)
from siamesenorm.residual.kernels.siamese_step import ABSENT, LAYER, RMS

from .stacks import make, make_sublayers, randomise

TOLERANCE = {torch.float32: 4e-6, torch.bfloat16: 0.012, torch.float16: 0.0015}
"""Of the largest number in a tensor."""
SHAPES = [(1, 1), (2, 3), (130, 64), (2, 65, 100), (7, 1000), (7, 4096), (1, 2, 8192)]
"""Several rows in a tile, one a tile, a ragged last one, several tiles for each program."""
LOW = [(2, 65, 100), (7, 1000)]
"""Those in low precision, which the kernels widen as they load rows, whatever their shape."""
CHECKED = {"rtol": 0.02, "atol": 0.02}
"""What opcheck allows between two runs, some of them in low precision."""
EPS = [1e-2, 3e-3, 5e-2]
MODULES = {"rms_norm": triton_norm, "siamese_step": triton_siamese}
kernels = torch.library.Library("siamesenorm", "IMPL")
for operator, module in MODULES.items():
    kernels.impl(operator, module.forward, "CPU", allow_override=True)
    kernels.impl(f"{operator}_backward", module.backward, "CPU", allow_override=True)


def random(*shape, dtype=torch.float32):
    return torch.randn(shape).to(dtype).requires_grad_()


def gradients(run, tensors):
    """Results of a function, and the gradients of a sum with fixed factors."""
    out = run(*tensors)
    # of few bits, so that every dtype has the same factors
    waves = [torch.linspace(-1, 1, t.numel(), dtype=torch.bfloat16).view(t.shape).to(t.dtype) for t in out]
    wanted = [t for t in tensors if t is not None]
    return [*out, *torch.autograd.grad(out, wanted, waves)]


def in_double(tensors):
    return [None if t is None else t.detach().double().requires_grad_() for t in tensors]


def assert_agree(run, plain, tensors, tolerance=None):
    """The kernels beside the plain form in float64 on the same numbers; dtypes as the tensors' own."""
    dtype = tensors[0].dtype
    tolerance = tolerance or TOLERANCE[dtype]
    found, expected = gradients(run, tensors), gradients(plain, in_double(tensors))
    given = [t for t in tensors if t is not None]
    assert [t.dtype for t in found] == [dtype] * (len(found) - len(given)) + [t.dtype for t in given]
    for mine, theirs in zip(found, expected, strict=True):
        assert mine.is_contiguous()
        bound = tolerance * max(theirs.abs().max().item(), 0.1)
        assert_close(mine.double(), theirs, rtol=0, atol=bound)


def assert_norm_agrees(x, weight, bias, eps=1e-3):
    assert_agree(
        lambda *t: torch.ops.siamesenorm.rms_norm(*t, eps)[:1],
        lambda *t: (rms_norm.plain(*t, eps),),
        [x, weight, bias],
    )


def assert_step_agrees(streams, parameters, kinds, scale=0.6, tolerance=None):
    assert_agree(
        lambda x, y, o, *p: torch.ops.siamesenorm.siamese_step(x, y, o, scale, *p, kinds, EPS)[:3],
        lambda x, y, o, *p: siamese_step.plain(x, y, o, scale, p, kinds, EPS),
        [*streams, *parameters],
        tolerance,
    )


def assert_reading_agrees(streams, parameters, kinds, tolerance=None):
    """The same where nothing is written; X' is an output where it is normed."""
    kept = slice(0 if kinds[0] else 2, 3, 2)
    assert_agree(
        lambda x, y, *p: siamese_step.siamese_step(x, y, None, 0.0, p, kinds, EPS)[kept],
        lambda x, y, *p: siamese_step.plain(x, y, None, 0.0, p, kinds, EPS)[kept],
        [*streams, *parameters],
        tolerance,
    )


def parameters_for(width, kinds, weights=True, biases=True, gain=True, dtype=torch.float32):
    """Weight and bias of each norm that is there, then g."""
    there = [kind != ABSENT and asked for kind in kinds for asked in (weights, biases)]
    return [random(width, dtype=dtype) if wanted else None for wanted in (*there, gain)]


@pytest.mark.parametrize(("shape", "dtype"), [(s, d) for d in TOLERANCE for s in (SHAPES if d.itemsize > 2 else LOW)])
def test_norm(shape, dtype):
    assert_norm_agrees(random(*shape, dtype=dtype), *(random(shape[-1], dtype=dtype) for _ in range(2)))


@pytest.mark.parametrize(("weight", "bias"), list(itertools.product([False, True], repeat=2)))
def test_norm_without_parameters(weight, bias):
    assert_norm_agrees(random(3, 10), random(10) if weight else None, random(10) if bias else None)


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        *((shape, torch.float32) for shape in [(2, 3), (2, 65, 100), (3, 1000), (4, 4096)]),
        *(((2, 65, 100), dtype) for dtype in TOLERANCE if dtype.itemsize == 2),
    ],
)
def test_step(shape, dtype):
    kinds = [RMS, LAYER, RMS] if shape[-1] % 100 else [LAYER, RMS, LAYER]
    streams = [random(*shape, dtype=dtype) for _ in range(3)]
    assert_step_agrees(streams, parameters_for(shape[-1], kinds, dtype=dtype), kinds)
    if shape[-1] <= 100:
        assert_reading_agrees(streams[:2], parameters_for(shape[-1], kinds, dtype=dtype), kinds)


@pytest.mark.parametrize("shape", [(1, 1), (1, 2, 8192)])
def test_step_of_the_narrowest_and_widest_rows(shape):
    assert_step_agrees([random(*shape) for _ in range(3)], parameters_for(shape[-1], [RMS] * 3), [RMS] * 3)


@pytest.mark.parametrize("kinds", list(itertools.product([ABSENT, RMS, LAYER], [RMS, LAYER], [ABSENT, RMS, LAYER])))
def test_step_of_any_norms(kinds):
    """Each kind of each norm with and without a gain, with and without weights and biases."""
    weights, biases, gain = kinds[0] != kinds[1], kinds[1] != kinds[2], sum(kinds) % 2 == 0
    parameters = parameters_for(5, kinds, weights, biases, gain)
    assert_step_agrees([random(3, 5) for _ in range(3)], parameters, list(kinds))
    assert_reading_agrees([random(3, 5) for _ in range(2)], parameters, list(kinds))


def test_parameters_of_another_dtype_than_rows():
    """Norms of low-precision rows with float32 parameters, and under autocast a low-precision O beside the streams."""
    low, kinds = torch.bfloat16, [RMS, LAYER, RMS]
    assert_norm_agrees(random(3, 10, dtype=low), random(10), random(10, dtype=torch.float16))
    assert_step_agrees([random(3, 10, dtype=low) for _ in range(3)], parameters_for(10, kinds, gain=False), kinds)
    streams = [random(3, 10), random(3, 10), random(3, 10, dtype=low)]
    assert_step_agrees(streams, parameters_for(10, kinds), kinds, tolerance=TOLERANCE[low])


def test_tensors_that_do_not_lie_in_one_piece():
    def strided(*shape):
        return torch.randn(*shape[:-1], 2 * shape[-1])[..., ::2].requires_grad_()

    assert_norm_agrees(strided(3, 10), strided(10), torch.full((1,), 3.0).expand(10).requires_grad_())
    turned = torch.randn(10, 3).t().requires_grad_()
    kinds = [RMS, RMS, RMS]
    assert_step_agrees([strided(3, 10), turned, strided(3, 10)], [strided(10) for _ in range(7)], kinds)


@pytest.mark.parametrize("shape", [(0, 4), (2, 0, 4), (2, 0)])
def test_nothing(shape):
    kinds = [RMS, LAYER, ABSENT]
    norm = gradients(
        lambda *t: torch.ops.siamesenorm.rms_norm(*t, 1e-3)[:1],
        [random(*shape), *(random(shape[-1]) for _ in range(2))],
    )
    tensors = [random(*shape) for _ in range(3)] + parameters_for(shape[-1], kinds)
    step = gradients(lambda x, y, o, *p: torch.ops.siamesenorm.siamese_step(x, y, o, 0.5, *p, kinds, EPS)[:3], tensors)
    assert all(torch.equal(t, torch.zeros_like(t)) for t in (*norm, *step))


def test_another_shape_is_refused():
    x, norms = torch.randn(2, 8), (None,) * 7
    refused = pytest.raises(
        RuntimeError, match=r"a tensor of shape \(.*\) on cpu is needed, got one of shape \(.*\) on cpu"
    )
    for width in (4, 16):
        with refused:
            torch.ops.siamesenorm.rms_norm(x, torch.randn(width), None, 1e-3)
    for y, o in ((torch.randn(1, 8), x), (x, torch.randn(2, 4)), (x, torch.randn(8))):
        with refused:
            torch.ops.siamesenorm.siamese_step(x, y, o, 1.0, *norms, [0, 1, 0], EPS)
    for kinds in ([0, 1], [0, 3, 0]):
        with pytest.raises(RuntimeError, match=r"kinds .* are not allowed"):
            torch.ops.siamesenorm.siamese_step(x, x, x, 1.0, *norms, kinds, EPS)
    with refused:
        triton_norm.backward(x[:1], x, None, None, torch.randn(2))


def test_rows_that_are_no_numbers_stay_to_themselves():
    x = torch.randn(4, 10)
    x[1, 3], x[2, 5] = torch.inf, torch.nan
    out, _ = triton_norm.forward(x, None, None, 1e-3)
    assert_close(out, rms_norm.plain(x, None, None, 1e-3), equal_nan=True)


def test_gradients_are_the_same_bits_every_time():
    kinds = [RMS, RMS, RMS]
    tensors = [random(130, 64) for _ in range(3)] + parameters_for(64, kinds)

    def run(x, y, o, *p):
        return torch.ops.siamesenorm.siamese_step(x, y, o, 0.5, *p, kinds, EPS)[:3]

    assert triton_rows.Launch.over(tensors[0]).programs > 1
    for first, second in zip(gradients(run, tensors), gradients(run, tensors), strict=True):
        assert torch.equal(first, second)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_opcheck_of_the_norm(dtype):
    x, weight = random(3, 5, dtype=dtype), random(5)
    operators = torch.ops.siamesenorm
    torch.library.opcheck(operators.rms_norm.default, (x, weight, random(5), 1e-3), **CHECKED)
    _, rstd = operators.rms_norm(x, weight, None, 1e-3)
    arguments = [t.detach() for t in (x, x, weight)]
    torch.library.opcheck(operators.rms_norm_backward.default, (*arguments, None, rstd), **CHECKED)


@pytest.mark.parametrize(
    ("kinds", "dtype"), [([RMS, RMS, RMS], torch.float32), ([ABSENT, LAYER, ABSENT], torch.bfloat16)]
)
def test_opcheck_of_the_step(kinds, dtype):
    streams = [random(3, 5, dtype=dtype) for _ in range(3)]
    parameters = parameters_for(5, kinds, gain=False)
    operators = torch.ops.siamesenorm
    arguments = (*streams, 0.5, *parameters, kinds, EPS)
    torch.library.opcheck(operators.siamese_step.default, arguments, **CHECKED)
    next_x, y1, _, x1, stats = operators.siamese_step(*arguments)
    kept = [t.detach() for t in (*streams, x1 if kinds[0] else next_x, y1, stats)]
    parameters = [None if p is None else p.detach() for p in parameters]
    torch.library.opcheck(operators.siamese_step_backward.default, (*kept, 0.5, *parameters, kinds), **CHECKED)


@pytest.mark.parametrize("precision", ["float32", "bfloat16", "autocast"])
@pytest.mark.parametrize("text", ["siamese", "siamese:form=hybrid_pre"])
def test_a_stack_runs_on_them(monkeypatch, text, precision):
    """With errors like the plain form's in the same precision; under autocast streams are wider than updates."""
    started = []
    real = triton_rows.Launch.run
    monkeypatch.setattr(
        triton_rows.Launch,
        "run",
        lambda self, kernel, *rest, **how: started.append(kernel) or real(self, kernel, *rest, **how),
    )
    monkeypatch.setattr(devices, "takes", lambda x, *_: native.allowed() and x.dtype in devices.GPU_DTYPES)
    dtype = torch.bfloat16 if precision == "bfloat16" else torch.float32
    topology, sublayers = make(text, 2, 8, dtype), make_sublayers([["attention", "ffn"]] * 2, 8, dtype)
    randomise(topology)
    x = random(2, 3, 8, dtype=dtype)

    def run(x):
        with torch.autocast("cpu", torch.bfloat16, enabled=precision == "autocast" and x.dtype is dtype):
            return gradients(lambda x, *_: [topology(x, sublayers)], [x, *topology.parameters()])

    found = run(x)
    assert [started.count(kernel) for kernel in (triton_siamese._step_forward, triton_siamese._step_backward)] == [4, 4]
    assert started.count(triton_norm._norm_forward) == started.count(triton_norm._norm_backward) > 0
    started.clear()
    with native.disabled():
        plain = run(x)
        topology.double(), sublayers.double()
        exact = run(*in_double([x]))
    assert not started
    assert {t.dtype for t in found} == {dtype}
    assert off(found, exact) <= 1.5 * off(plain, exact)


def off(results, exact):
    return sum(((a - b) / b.abs().max()).norm().item() for a, b in zip(results, exact, strict=True))
