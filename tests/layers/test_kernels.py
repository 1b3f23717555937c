"""The compiled CPU kernels of the layers agree with PyTorch's operators, and step aside where they cannot run."""

import contextlib

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.testing import assert_close

from closeness import assert_same_but_for_rounding
from siamesenorm.layers.cache import KeyValueCache
from siamesenorm.layers.kernels import decode
from siamesenorm.layers.kernels.rotary import plain, rotary
from siamesenorm.layers.kernels.swiglu import swiglu
from siamesenorm.layers.linear import Linear
from siamesenorm.layers.moe import MoE
from siamesenorm.layers.rotary import Rotary, rotate, split_and_rotate
from siamesenorm.models.lm import LanguageModel, LMConfig, generate
from siamesenorm.residual.kernels import native
from siamesenorm.residual.kernels.native import disabled

pytestmark = pytest.mark.skipif(native.library() is None, reason="installed without the compiled kernels")
CLOSE = {"rtol": 1e-5, "atol": 1e-5}


@pytest.fixture
def called(monkeypatch):
    """Names of the kernels that ran."""
    names, real = [], native.call
    monkeypatch.setattr(native, "call", lambda name, arguments: names.append(name) or real(name, arguments))
    return names


@settings(max_examples=40)
@given(
    rows=st.lists(st.integers(1, 5), max_size=2),
    width=st.integers(1, 40),
    out=st.integers(1, 40),
    bias=st.booleans(),
    strided=st.booleans(),
)
def test_a_linear_layer_on_a_few_rows(rows, width, out, bias, strided):
    torch.manual_seed(0)
    layer = Linear(width, out, bias=bias)
    x = torch.randn(*rows, 2 * width)[..., ::2] if strided else torch.randn(*rows, width)
    with torch.no_grad():
        assert_close(layer(x), F.linear(x, layer.weight, layer.bias), **CLOSE)


@pytest.mark.parametrize("threads", [1, 2])
def test_rows_of_a_wide_layer_are_shared_out_between_threads(threads):
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        layer, x = Linear(300, 403), torch.randn(3, 300)
        with torch.no_grad():
            assert_close(layer(x), F.linear(x, layer.weight, layer.bias), **CLOSE)
    finally:
        torch.set_num_threads(before)


def test_many_rows_gradients_other_types_and_autocast_go_to_pytorch(called):
    layer = Linear(8, 8)
    with torch.no_grad():
        layer(torch.randn(1, 8))
        assert called == ["linear"]
        layer(torch.randn(decode.FEW_ROWS + 1, 8))
        layer(torch.randn(0, 8))
        layer.double()(torch.randn(1, 8, dtype=torch.float64))
        layer.float()
        with torch.autocast("cpu", torch.bfloat16):
            assert layer(torch.randn(1, 8)).dtype is torch.bfloat16
        with disabled():
            layer(torch.randn(1, 8))
    layer(torch.randn(1, 8)).sum().backward()
    assert called == ["linear"]
    assert layer.weight.grad is not None


def test_a_wrong_width_never_reaches_the_kernel():
    with torch.no_grad(), pytest.raises(RuntimeError, match="shape"):
        Linear(8, 8)(torch.randn(1, 16))


@settings(max_examples=60)
@given(
    tokens=st.integers(1, 12),
    width=st.integers(1, 40),
    hidden=st.integers(1, 140),
    experts=st.integers(1, 9),
    share=st.floats(0, 1),
    bias=st.booleans(),
    normalize=st.booleans(),
    threads=st.sampled_from([1, 2]),
)
def test_experts_on_a_few_tokens(tokens, width, hidden, experts, share, bias, normalize, threads):
    torch.manual_seed(0)
    moe = MoE(width, hidden, experts, 1 + int(share * (experts - 1)), bias=bias, normalize_top_k=normalize)
    for parameter in (moe.b_in, moe.b_out) if bias else ():
        torch.nn.init.normal_(parameter)
    h, before = torch.randn(2 * tokens, width)[::2], torch.get_num_threads()
    torch.set_num_threads(threads)
    try:
        with torch.no_grad():
            out, stats = moe(h)
    finally:
        torch.set_num_threads(before)
    with disabled(), torch.no_grad():
        expected, reported = moe(h)
    assert_same_but_for_rounding(out, expected)
    assert torch.equal(stats.tokens_per_expert, reported.tokens_per_expert)
    assert_same_but_for_rounding(tuple(stats), tuple(reported), at_least=1.0)


def test_experts_with_wide_weights_are_shared_out_between_threads(called):
    torch.manual_seed(0)
    moe, h, found, before = MoE(128, 203, 8, 2), torch.randn(5, 128), [], torch.get_num_threads()
    for threads in (1, 2):
        torch.set_num_threads(threads)
        with torch.no_grad():
            found.append(moe(h)[0])
    torch.set_num_threads(before)
    assert called == ["experts"] * 2
    assert_close(*found, **CLOSE)


def test_experts_step_aside_where_they_cannot_run(called):
    moe, h = MoE(8, 6, 4, 2), torch.randn(3, 8)
    with torch.no_grad():
        moe(h)
        assert called == ["experts"]
        moe(torch.randn(decode.FEW_SLOTS // 2 + 1, 8))
        moe(torch.randn(0, 8))
        MoE(8, 6, 4, 2, activation="gelu")(h)
        MoE(8, 6, 4, 2, output_norm=lambda width: torch.nn.LayerNorm(width))(h)
        hook = moe.router.register_forward_hook(lambda *_: None)
        moe(h)
        hook.remove()
        with torch.autocast("cpu", torch.bfloat16):
            assert moe(h)[0].dtype is torch.bfloat16
        with disabled():
            moe(h)
        moe.double()(h.double())
    moe.float()(h)[0].sum().backward()
    assert called.count("experts") == 1
    assert moe.w_in.grad is not None


def test_experts_let_nan_through():
    h = torch.randn(3, 8)
    h[1, 2] = torch.nan
    with torch.no_grad():
        out, stats = MoE(8, 6, 4, 2)(h)
    assert out.isnan().all(-1).tolist() == [False, True, False]
    assert stats.tokens_per_expert.sum() == 6


@settings(max_examples=40)
@given(rows=st.lists(st.integers(0, 5), max_size=3), hidden=st.integers(1, 40), size=st.sampled_from([1.0, 30.0, 1e4]))
def test_swiglu(rows, hidden, size):
    torch.manual_seed(0)
    projected = (torch.randn(*rows, 2 * hidden) * size).requires_grad_()
    value, gate = projected.chunk(2, dim=-1)
    expected, got = F.silu(gate) * value, swiglu(projected)
    assert_close(got, expected, rtol=1e-5, atol=1e-6 * size * size)
    wave = torch.linspace(-1, 1, got.numel()).view_as(got)
    expected, got = (torch.autograd.grad(out, projected, wave)[0] for out in (expected, got))
    assert_close(got, expected, rtol=1e-5, atol=1e-6 * size)


def test_swiglu_lets_nan_and_infinity_through():
    projected = torch.tensor([[1.0, 1.0, 1.0, torch.inf, torch.nan, 2.0], [torch.inf, 1.0, torch.nan, 1.0, 1.0, 1.0]])
    with torch.no_grad():
        assert swiglu(projected).isfinite().tolist() == [[False, False, True], [False, True, False]]


@settings(max_examples=40)
@given(
    batch=st.integers(1, 3),
    tokens=st.integers(1, 5),
    heads=st.integers(1, 3),
    half=st.integers(1, 9),
    rows=st.booleans(),
    order=st.sampled_from([(0, 1, 2), (0, 2, 1), (1, 0, 2)]),
)
def test_rotary_positions(batch, tokens, heads, half, rows, order):
    """Whatever order batch, tokens and heads lie in, and with positions of each row's own."""
    torch.manual_seed(0)
    back = tuple(order.index(k) for k in range(3))
    sizes = [(batch, tokens, heads)[k] for k in order]
    x = torch.randn(*sizes, 2 * half).permute(*back, 3).requires_grad_()
    positions = torch.arange(batch * tokens).view(batch, tokens) if rows else torch.arange(tokens)
    cos_sin = Rotary().cos_sin(positions, 2 * half)
    with disabled():
        expected = rotate(x, cos_sin)
        expected_grad = torch.autograd.grad(expected.square().sum(), x)
    got = rotate(x, cos_sin)
    assert_close(got, expected, **CLOSE)
    assert_close(torch.autograd.grad(got.square().sum(), x), expected_grad, rtol=1e-4, atol=1e-4)


@settings(max_examples=40)
@given(
    batch=st.integers(1, 3),
    kv_heads=st.integers(1, 3),
    group=st.integers(1, 3),
    length=st.integers(0, 70),
    window=st.integers(1, 80),
)
def test_a_token_attends_to_its_cache(batch, kv_heads, group, length, window):
    torch.manual_seed(0)
    width, heads, first = 6, kv_heads * group, max(0, length + 1 - window)
    keys, values = torch.randn(2, batch, kv_heads, length + 3, width)
    q, k, v = torch.randn(batch, 1, heads + 2 * kv_heads, width).split([heads, kv_heads, kv_heads], dim=2)
    cos, sin = Rotary().cos_sin(torch.tensor([length]), width)
    cache = KeyValueCache(1, batch, kv_heads, length + 3, width)
    cache.keys, cache.values, cache.length = [keys.clone()], [values.clone()], length
    seen = cache.update(0, rotate(k, (cos, sin)).transpose(1, 2), v.transpose(1, 2))
    turned = rotate(q, (cos, sin)).transpose(1, 2)
    expected = F.scaled_dot_product_attention(turned, *(t[:, :, first:] for t in seen), enable_gqa=True)
    with torch.no_grad():
        got = decode.attention(q, k, v, cos, sin, keys, values, length, first)
    assert_close(got, expected.transpose(1, 2).reshape(batch, 1, -1), **CLOSE)
    assert_close((keys[:, :, : length + 1], values[:, :, : length + 1]), seen, **CLOSE)


@pytest.mark.parametrize("turned", [0, 1, 3])
def test_some_heads_are_turned_and_others_copied(turned):
    x, cos_sin = torch.randn(2, 5, 3, 4, requires_grad=True), Rotary().cos_sin(torch.arange(5), 4)
    expected = torch.cat([plain(x[:, :, :turned], *cos_sin), x[:, :, turned:]], dim=2)
    got = rotary(x, turned, *cos_sin)
    assert_close(got, expected, **CLOSE)
    assert_close(*(torch.autograd.grad(out.square().sum(), x) for out in (got, expected)), rtol=1e-4, atol=1e-4)


def test_queries_and_keys_of_one_projection_are_turned_together():
    qkv, cos_sin = torch.randn(2, 5, 8, 4), Rotary().cos_sin(torch.arange(5), 4)
    q, k, v = qkv.split([4, 2, 2], dim=2)
    assert_close(split_and_rotate(qkv, 4, 2, cos_sin), (rotate(q, cos_sin), rotate(k, cos_sin), v), **CLOSE)


def test_angles_of_a_learned_kind_keep_their_gradient():
    x, angles = torch.randn(2, 5, 3, 4), torch.rand(2, 5, 1, 4, requires_grad=True)
    got = torch.autograd.grad(rotary(x, 3, *angles).square().sum(), angles)
    assert_close(got, torch.autograd.grad(plain(x, *angles).square().sum(), angles))
    assert got[0].any()


def test_angles_of_each_head_are_not_taken_for_angles_of_each_row():
    x, angles = torch.randn(3, 5, 3, 4), torch.rand(2, 5, 3, 4)
    assert_close(rotary(x, 3, *angles), plain(x, *angles))


@pytest.mark.parametrize(("made", "used"), [(1, 4), (4, 1), (2, 3)])
@pytest.mark.parametrize("tokens", [1, 3])
@pytest.mark.parametrize("kernels", [True, False])
def test_a_cache_made_for_other_rows_is_refused(made, used, tokens, kernels):
    model = LanguageModel(LMConfig(vocab_size=40, dim=24, blocks=2, heads=4, ffn_dim=32), seed=0)
    cache = model.new_cache(made, 16)
    with torch.no_grad(), contextlib.nullcontext() if kernels else disabled():
        model(torch.zeros(made, 2, dtype=torch.long), cache=cache)
        with pytest.raises(ValueError, match=f"made for {made} rows, {used} are given"):
            model(torch.zeros(used, tokens, dtype=torch.long), cache=cache)
        keys, values = torch.randn(2, made, 4, 16, 6)
        heads, cos_sin = torch.randn(3, used, 1, 4, 6), Rotary().cos_sin(torch.tensor([2]), 6)
        with pytest.raises(RuntimeError, match="kernel: a tensor of shape"):
            torch.ops.siamesenorm.next_token_attention(*heads, *cos_sin, keys, values, 2, 0)


@pytest.mark.parametrize(("length", "first"), [(16, 0), (-1, 0), (3, 4), (3, -1)])
def test_places_outside_of_the_cache_are_refused(length, first):
    keys, values = torch.randn(2, 2, 4, 16, 6)
    heads, cos_sin = torch.randn(3, 2, 1, 4, 6), Rotary().cos_sin(torch.tensor([2]), 6)
    with pytest.raises(RuntimeError, match="do not fit a cache"):
        torch.ops.siamesenorm.next_token_attention(*heads, *cos_sin, keys, values, length, first)


@pytest.mark.parametrize("topology", ["pre", "siamese", "siamese:form=hybrid_pre", "hybrid"])
def test_decoding_with_and_without_kernels_gives_the_same_tokens(called, topology):
    config = LMConfig(vocab_size=40, dim=24, blocks=2, heads=4, kv_heads=2, ffn_dim=32, window=7, topology=topology)
    model = LanguageModel(config, seed=0)
    prompts = [[1, 2, 3, 4], [5, 6, 7, 8]]
    tokens = generate(model, prompts, max_new_tokens=20)
    assert {"linear", "decode", "swiglu_forward"} <= set(called)
    with disabled():
        assert generate(model, prompts, max_new_tokens=20) == tokens
    ragged = [[1, 2, 3, 4], [5, 6]]  # filling on the left needs a mask: the general way
    called.clear()
    tokens = generate(model, ragged, max_new_tokens=5)
    assert "decode" not in called
    assert tokens == [generate(model, [row], max_new_tokens=5)[0] for row in ragged]


def test_a_mixture_of_experts_decodes_the_same_with_and_without_kernels(called):
    moe = {"experts": 6, "top_k": 2, "expert_dim": 20}
    model = LanguageModel(LMConfig(vocab_size=40, dim=24, blocks=2, heads=4, ffn_dim=32, moe=moe), seed=0)
    prompts = [[1, 2, 3, 4], [5, 6, 7]]
    tokens = generate(model, prompts, max_new_tokens=20)
    assert called.count("experts") == 2 * 20
    with disabled():
        assert generate(model, prompts, max_new_tokens=20) == tokens
