"""Every operator: known to torch, right on nothing and on strides, and closed to what C must not see."""

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close

from siamesenorm.residual.kernels import native

from .operators import DIFFERENTIABLE, OPERATORS, broken, call, defined, draw, examples, strided, tensors

built = pytest.mark.skipif(native.library() is None, reason="installed without the compiled kernels")
pytestmark = built
CASES = [pytest.param(*case, id=f"{case[0]}-{number}") for number, case in enumerate(examples())]
every_case = pytest.mark.parametrize(("name", "arguments"), CASES)
ANGLES = {("rotary", 2), ("rotary", 3)}
"""Arguments that take no gradient."""


def leaves(name, arguments):
    """The same arguments with gradients asked for wherever there may be one."""
    return [
        t.detach().clone().requires_grad_()
        if isinstance(t, Tensor) and t.is_floating_point() and (name, k) not in ANGLES
        else t
        for k, t in enumerate(arguments)
    ]


def test_there_are_arguments_for_every_operator():
    assert {name for name, _ in examples()} == set(defined())


@every_case
def test_opcheck(name, arguments):
    """Schema, shapes without data, autograd and what compilers make of it."""
    given = leaves(name, arguments) if name in DIFFERENTIABLE else arguments
    torch.library.opcheck(getattr(OPERATORS, name).default, tuple(given))


@every_case
def test_a_missing_derivative_is_refused_and_never_zero(name, arguments):
    if name == "next_token_attention":  # torch lets nobody refuse for an operator that writes into its arguments
        q = arguments[0].clone().requires_grad_()
        with pytest.warns(UserWarning, match="autograd kernel was not registered"):
            call(name, (q, *arguments[1:])).sum().backward()
        return
    out = tensors(call(name, leaves(name, arguments)))
    if name in DIFFERENTIABLE:
        assert out[0].requires_grad
    else:
        with pytest.raises(NotImplementedError, match=f"siamesenorm::{name} has no derivative"):
            out[0].sum().backward()


def test_rotary_refuses_a_derivative_for_its_angles():
    x, cos, sin = torch.randn(1, 2, 1, 4), *torch.rand(2, 2, 1, 4)
    with pytest.raises(NotImplementedError, match="angles"):
        OPERATORS.rotary(x, 1, cos.requires_grad_(), sin, 1.0)


@every_case
def test_strides_do_not_matter(name, arguments):
    def spread(t):
        if not isinstance(t, Tensor) or not t.is_floating_point() or (name == "next_token_attention" and t.dim() == 4):
            return t
        return torch.stack([t, t], dim=-1).flatten(-2)[..., ::2]

    kept = [t.clone() if isinstance(t, Tensor) else t for t in arguments]
    assert_close(tensors(call(name, map(spread, kept))), tensors(call(name, arguments)), rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(("name", "arguments"), list(examples(rows=0)))
def test_no_rows_at_all(name, arguments):
    """Right shapes, and zero wherever a sum over nothing is asked for."""
    for t in tensors(call(name, arguments)):
        assert not t.numel() or name == "few_tokens_experts" or not t.any()
    if name in DIFFERENTIABLE:
        given = leaves(name, arguments)
        wanted = [t for t in given if isinstance(t, Tensor) and t.requires_grad]
        for grad in torch.autograd.grad(tensors(call(name, given))[0].sum(), wanted, allow_unused=True):
            assert grad is None or not grad.any()


@every_case
def test_wrong_shapes_and_dtypes_are_refused(name, arguments):
    """Whatever one tensor is, C never sees an address whose memory is not what the others say."""
    if name.startswith("grouped"):
        pytest.skip("calls no kernel of ours")
    shape = tensors(call(name, [t.clone() if isinstance(t, Tensor) else t for t in arguments]))[0].shape
    for k, given in broken(arguments):
        try:
            out = tensors(call(name, given))
        except (RuntimeError, ValueError, IndexError):
            continue
        # A tensor that alone says how large a dimension is may be of any size.
        assert out[0].dtype is torch.float32, k
        assert out[0].shape != shape, k


def test_memory_that_was_given_back_is_refused():
    x = torch.randn(4, 6)
    x.untyped_storage().resize_(0)
    with pytest.raises(RuntimeError, match="given back"):
        OPERATORS.rms_norm(x, None, None, 1e-5)


def test_zero_tensors_and_negated_views_are_made_real():
    """Autograd hands such tensors around: they have no numbers of their own in memory, or others than they say."""
    zero, negative = torch._efficientzerotensor((2, 6)), torch._neg_view(torch.randn(2, 6))
    for x in (zero, negative):
        assert_close(OPERATORS.rms_norm(x, None, None, 1e-5)[0], OPERATORS.rms_norm(x + 0, None, None, 1e-5)[0])


@pytest.mark.parametrize("kinds", [[1, 0, 1], [1, 1], [1, 1, 3], [1, 1, 1, 1]])
def test_norms_that_the_step_does_not_know_are_refused(kinds):
    tensors = [draw(2, 6) for _ in range(3)]
    with pytest.raises(RuntimeError, match="siamese_step"):
        OPERATORS.siamese_step(*tensors, 1.0, *[None] * 7, kinds, [1e-5] * 3)


def test_copies_live_until_they_are_read():
    """Gradients that do not lie in one piece are copied for C; the copies must not be freed on the way there."""
    x, y, o = (strided(64, 64).requires_grad_() for _ in range(3))
    parameters = *(draw(64) for _ in range(6)), None

    def gradients(run):
        out = run(x, y, o, 0.5, *parameters, [1, 1, 1], [1e-5] * 3)[:3]
        return torch.autograd.grad([t.sum() * k for k, t in enumerate(out, 1)], [x, y, o])

    from siamesenorm.residual.kernels.siamese_step import plain

    got = gradients(OPERATORS.siamese_step)
    assert_close(got, gradients(lambda x, y, o, c, *rest: plain(x, y, o, c, rest[:7], *rest[7:])), rtol=1e-4, atol=1e-4)
