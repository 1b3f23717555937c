"""The mixture of experts: what it computes, against every expert on every token, and which options it refuses."""

from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from siamesenorm.residual import RMSNorm

from .experts import batch, every_expert_on_every_token, gradients, make, outputs


@pytest.mark.parametrize(
    ("activation", "bias", "normalize", "norm"),
    list(product(("swiglu", "gelu"), (False, True), (False, True), (False, True))),
)
def test_equals_every_expert_on_every_token_in_outputs_and_all_gradients(activation, bias, normalize, norm):
    output_norm = RMSNorm if norm else None
    moe = make(activation=activation, bias=bias, normalize_top_k=normalize, output_norm=output_norm)
    h = batch(3, 7)
    ours, theirs = outputs(moe, h), every_expert_on_every_token(moe, h)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(gradients(moe, h, ours), gradients(moe, h, theirs), rtol=1e-11, atol=1e-11)


@settings(max_examples=25, deadline=None)
@given(st.integers(1, 7), st.data(), st.integers(0, 20), st.integers(0, 10**6))
def test_any_shape_meets_the_reference(experts, data, tokens, seed):
    top_k = data.draw(st.integers(1, experts))
    moe, h = make(seed, experts=experts, top_k=top_k), batch(tokens, seed=seed + 1)
    out, stats = moe(h)
    assert stats.tokens_per_expert.sum() == tokens * top_k
    assert stats.tokens_per_expert.max() <= tokens
    if tokens:
        torch.testing.assert_close(out, every_expert_on_every_token(moe, h)[0], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("activation", ["swiglu", "gelu"])
@pytest.mark.parametrize("bias", [False, True])
def test_gradients_agree_with_finite_differences(activation, bias):
    moe, h = make(activation=activation, bias=bias, hidden=3), batch(4)
    names, values = zip(*moe.named_parameters(), strict=True)

    def call(h: Tensor, *parameters: Tensor) -> tuple[Tensor, ...]:
        out, stats = torch.func.functional_call(moe, dict(zip(names, parameters, strict=True)), (h,))
        return out, stats.balance_loss, stats.z_loss

    assert torch.autograd.gradcheck(call, (h, *values))


def test_no_token_loses_an_expert_when_all_choose_the_same():
    moe = make()
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.weight[[1, 3], 0] = torch.tensor([4.0, 3.0], dtype=torch.float64)
    h = batch(40)
    with torch.no_grad():
        h[:, 0] = 1.0
    out, stats = moe(h)
    assert stats.tokens_per_expert.tolist() == [0, 40, 0, 40, 0]
    torch.testing.assert_close(out, every_expert_on_every_token(moe, h)[0])


def test_one_expert_is_the_dense_mlp():
    moe, h = make(experts=1, top_k=1), batch(2, 3)
    value, gate = (h @ moe.w_in[0].t()).chunk(2, -1)
    torch.testing.assert_close(moe(h)[0], (F.silu(gate) * value) @ moe.w_out[0].t())
    assert moe(h)[1].balance_loss.item() == pytest.approx(1)
    assert moe(h)[1].router_entropy.item() == pytest.approx(0)


def test_permuting_tokens_permutes_outputs():
    moe, h = make(), batch(50)
    order = torch.randperm(50, generator=torch.Generator().manual_seed(2))
    (out, stats), (shuffled, same) = moe(h), moe(h[order])
    torch.testing.assert_close(shuffled, out[order], rtol=1e-13, atol=1e-13)
    assert torch.equal(stats.tokens_per_expert, same.tokens_per_expert)


def test_permuting_experts_changes_nothing():
    moe, other, h = make(), make(), batch(50)
    order = torch.tensor([3, 0, 4, 1, 2])
    with torch.no_grad():
        for weight, source in zip(other.parameters(), moe.parameters(), strict=True):
            weight.copy_(source[order])
    (out, stats), (same, permuted) = moe(h), other(h)
    torch.testing.assert_close(out, same, rtol=1e-13, atol=1e-13)
    assert torch.equal(stats.tokens_per_expert[order], permuted.tokens_per_expert)
    assert stats.balance_loss.item() == pytest.approx(permuted.balance_loss.item())


def test_the_router_weighs_an_expert_by_its_probability():
    """Scaling the first expert's output scales that part alone: weights are probabilities, not renormalised."""
    moe, h = make(experts=2, top_k=1), batch(9)
    p = (h @ moe.router.weight.t()).softmax(-1)
    with torch.no_grad():
        moe.w_in[1], moe.w_out[1] = moe.w_in[0], moe.w_out[0]
    value, gate = (h @ moe.w_in[0].t()).chunk(2, -1)
    dense = (F.silu(gate) * value) @ moe.w_out[0].t()
    torch.testing.assert_close(moe(h)[0], p.max(-1, keepdim=True).values * dense)
    moe.normalize_top_k = True
    torch.testing.assert_close(moe(h)[0], dense)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"top_k": 6}, "top_k = 6 is not allowed; it takes a number from 1 to experts = 5"),
        ({"top_k": 0}, "top_k = 0"),
        ({"experts": 0}, "experts = 0"),
        ({"hidden": 0}, "hidden = 0"),
        ({"activation": "relu"}, "unknown activation 'relu'; known activations: swiglu, gelu"),
    ],
)
def test_bad_options_say_what_is_allowed(options, message):
    with pytest.raises(ValueError, match=message):
        make(**options)
