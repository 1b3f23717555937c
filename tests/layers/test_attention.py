"""Attention against a straight-line implementation, for every inner norm, with grouped heads."""

import math

import pytest
import torch

from closeness import assert_same_but_for_rounding
from siamesenorm.layers.attention import Attention, AttentionContext, combine_norms
from siamesenorm.layers.mask import visibility
from siamesenorm.layers.rotary import Rotary, rotate
from siamesenorm.residual import NormSpec, SublayerNeeds

HEADS, KV_HEADS, WIDTH, DIM, TOKENS = 4, 2, 6, 20, 7


def make(norm="none", qk_norm="none", output_norm=False, kv_heads=KV_HEADS, bias=False):
    attention = Attention(
        DIM,
        HEADS,
        kv_heads,
        WIDTH,
        needs=SublayerNeeds(norm, output_norm),
        norm=NormSpec("rms"),
        qk_norm=qk_norm,
        bias=bias,
    )
    for parameter in attention.parameters():
        torch.nn.init.normal_(parameter, std=0.5)
    return attention


def context(window=None):
    return AttentionContext(Rotary().cos_sin(torch.arange(TOKENS), WIDTH), visibility(TOKENS, TOKENS, window=window))


def rms(x, gain, eps=1e-5):
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + eps) * gain


def by_hand(a, h, window=None):
    """One query at a time, one head at a time."""
    kv_heads, cos_sin = a.kv_heads, Rotary().cos_sin(torch.arange(TOKENS), WIDTH)
    rows = a.qkv.weight.split([HEADS * WIDTH, kv_heads * WIDTH, kv_heads * WIDTH])
    q, k, v = (h @ w.T for w in rows)
    if a.norm_kind == "qk_projection":
        q, k = rms(q, a.q_norm.weight), rms(k, a.k_norm.weight)
    q, k, v = (t.unflatten(-1, (-1, WIDTH)) for t in (q, k, v))
    if a.norm_kind in ("qk_head", "qkv_head"):
        q, k = rms(q, a.q_norm.weight), rms(k, a.k_norm.weight)
    if a.norm_kind == "qkv_head":
        v = rms(v, a.v_norm.weight)
    q, k = rotate(q, cos_sin), rotate(k, cos_sin)
    out = torch.zeros(h.shape[0], TOKENS, HEADS, WIDTH)
    for row in range(h.shape[0]):
        for head in range(HEADS):
            shared = head // (HEADS // kv_heads)
            for t in range(TOKENS):
                first = 0 if window is None else max(0, t - window + 1)
                scores = k[row, first : t + 1, shared] @ q[row, t, head] / math.sqrt(WIDTH)
                out[row, t, head] = scores.softmax(0) @ v[row, first : t + 1, shared]
    out = out.flatten(2)
    return (out if a.out_norm is None else rms(out, a.out_norm.weight)) @ a.out.weight.T


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("norm", ["none", "qk_head", "qk_projection", "qkv_head"])
@pytest.mark.parametrize("output_norm", [False, True])
def test_straight_line(norm, output_norm, window):
    attention, h = make(norm, output_norm=output_norm), torch.randn(2, TOKENS, DIM)
    with torch.no_grad():
        assert_same_but_for_rounding(attention(h, context(window)), by_hand(attention, h, window))
    assert_same_but_for_rounding(attention(h, context(window)), by_hand(attention, h, window))


def test_grouped_heads_equal_repeated_ones():
    grouped, full = make("qkv_head"), make("qkv_head", kv_heads=HEADS)
    q, k, v = grouped.qkv.weight.data.split([HEADS * WIDTH, KV_HEADS * WIDTH, KV_HEADS * WIDTH])
    repeated = [t.unflatten(0, (KV_HEADS, WIDTH)).repeat_interleave(2, 0).flatten(0, 1) for t in (k, v)]
    full.load_state_dict({**grouped.state_dict(), "qkv.weight": torch.cat([q, *repeated])})
    h = torch.randn(2, TOKENS, DIM)
    torch.testing.assert_close(grouped(h, context()), full(h, context()), atol=1e-5, rtol=1e-4)


def test_the_topologys_norm_goes_before_the_models():
    assert combine_norms("none", "none") == "none"
    assert combine_norms("none", "head") == "qk_head"
    assert combine_norms("none", "projection") == "qk_projection"
    assert combine_norms("qkv_head", "projection") == "qkv_head"
    assert combine_norms("qk_projection", "head") == "qk_projection"


def test_gradients_reach_every_parameter_and_are_exact():
    attention = make("qk_head", bias=True).double()
    h = torch.randn(1, TOKENS, DIM, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradcheck(lambda x: attention(x, context()), (h,), eps=1e-4, atol=1e-3, rtol=1e-3)
    attention(h, context()).square().sum().backward()
    assert all(p.grad is not None and p.grad.abs().sum() > 0 for p in attention.parameters())


def test_role_weights_are_views_of_the_fused_projection():
    attention = make()
    roles = dict(attention.role_weights())
    assert list(roles) == ["query", "key", "value", "attention_out"]
    torch.nn.init.zeros_(roles["value"].data)
    assert attention.qkv.weight[-KV_HEADS * WIDTH :].abs().sum() == 0
    assert attention.qkv.weight[: -KV_HEADS * WIDTH].abs().sum() > 0
