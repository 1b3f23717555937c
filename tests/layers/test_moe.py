"""The mixture of experts: routing, its losses, and the grouped computation against every expert on every token."""

import math
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from siamesenorm import Residual
from siamesenorm.layers import grouped
from siamesenorm.layers.moe import MoE, RouterStats
from siamesenorm.residual import RMSNorm

DIM, HIDDEN, EXPERTS, TOP_K = 8, 6, 5, 2


def make(seed: int = 0, dtype: torch.dtype = torch.float64, **options: object) -> MoE:
    torch.manual_seed(seed)
    shape = {"dim": DIM, "hidden": HIDDEN, "experts": EXPERTS, "top_k": TOP_K} | options
    moe = MoE(**shape).to(dtype)
    for bias in (moe.b_in, moe.b_out):
        if bias is not None:
            nn.init.normal_(bias)
    return moe


def batch(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, DIM, generator=generator, dtype=dtype, requires_grad=True)


def every_expert_on_every_token(moe: MoE, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output, balance loss and z-loss from their definitions: all experts on all tokens, unchosen ones weighted 0."""
    tokens = h.reshape(-1, moe.dim)
    logits = tokens @ moe.router.weight.t()
    p = logits.exp() / logits.exp().sum(-1, keepdim=True)
    kept = p >= p.sort(-1, descending=True).values[:, moe.top_k - 1 : moe.top_k]
    weight = torch.where(kept, p, 0)
    if moe.normalize_top_k:
        weight = weight / weight.sum(-1, keepdim=True)
    out = torch.zeros_like(tokens)
    for e in range(moe.experts):
        inner = tokens @ moe.w_in[e].t() + (0 if moe.b_in is None else moe.b_in[e])
        if moe.activation == "swiglu":
            value, gate = inner[:, : moe.hidden], inner[:, moe.hidden :]
            units = gate * torch.sigmoid(gate) * value
        else:
            units = F.gelu(inner)
        units = units if moe.out_norm is None else moe.out_norm(units)
        out = out + weight[:, e : e + 1] * (units @ moe.w_out[e].t() + (0 if moe.b_out is None else moe.b_out[e]))
    balance = moe.experts * (kept.double().mean(0) / moe.top_k * p.mean(0)).sum()
    return out.view(h.shape), balance, logits.exp().sum(-1).log().square().mean()


def gradients(moe: MoE, h: Tensor, outputs: tuple[Tensor, ...]) -> list[Tensor]:
    weights = [torch.linspace(-1, 2, o.numel(), dtype=o.dtype).view(o.shape) + 0.3 for o in outputs]
    return list(torch.autograd.grad(outputs, [h, *moe.parameters()], weights))


def outputs(moe: MoE, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    out, stats = moe(h)
    return out, stats.balance_loss, stats.z_loss


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


def test_experts_nobody_chose_are_not_computed_and_get_a_zero_gradient(monkeypatch):
    moe = make()
    with torch.no_grad():
        moe.router.weight.zero_()
        moe.router.weight[[0, 2], 0] = torch.tensor([4.0, 3.0], dtype=torch.float64)
        moe.w_in[[1, 3, 4]] = math.nan
        moe.w_out[[1, 3, 4]] = math.nan
    h = batch(6)
    with torch.no_grad():
        h[:, 0] = 1.0
    rows = []
    mm = torch.mm
    monkeypatch.setattr(grouped.torch, "mm", lambda a, b, **kw: rows.append(a.shape[0]) or mm(a, b, **kw))
    out, _ = moe(h)
    assert rows == [6] * 4  # 2 experts × 2 projections, each once on its whole slice
    out.sum().backward()
    assert h.grad.isfinite().all()
    for weight in (moe.w_in, moe.w_out):
        assert (weight.grad[[1, 3, 4]] == 0).all()
        assert (weight.grad[[0, 2]].flatten(1).norm(dim=1) > 0).all()


def test_backward_allocates_one_gradient_for_all_experts():
    """Slicing stacked weights under autograd would make one of full size for every expert."""
    moe, h = make(experts=64, top_k=2, dtype=torch.float32), batch(256, dtype=torch.float32)
    out, _ = moe(h)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
        out.sum().backward()
    allocated = sum(max(event.self_cpu_memory_usage, 0) for event in profile.key_averages())
    stacked = 4 * (moe.w_in.numel() + moe.w_out.numel())
    slots = 4 * 256 * 2 * (6 * HIDDEN + 6 * DIM)
    assert allocated < 2 * stacked + 3 * slots  # against 64 × stacked


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


# Losses and statistics --------------------------------------------------------------------------------------


def routed(logits: Tensor, top_k: int) -> RouterStats:
    """Statistics of a layer whose router's logits are given: the tokens are the logits, the router the identity."""
    moe = MoE(logits.shape[1], 2, logits.shape[1], top_k).double()
    nn.init.eye_(moe.router.weight)
    return moe(logits)[1]


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_balance_loss_is_1_at_uniform_routing(top_k):
    experts = 6
    logits = 1e-9 * torch.stack([torch.eye(experts).roll(i, 0) for i in range(top_k)]).sum(0).double()
    stats = routed(logits, top_k)
    assert stats.tokens_per_expert.tolist() == [top_k] * experts
    assert stats.balance_loss.item() == pytest.approx(1, abs=1e-6)
    assert stats.router_entropy.item() == pytest.approx(math.log(experts))


@pytest.mark.parametrize("top_k", [1, 2, 3])
def test_balance_loss_is_highest_at_collapse(top_k):
    experts = 6
    logits = torch.zeros(30, experts, dtype=torch.float64)
    logits[:, :top_k] = 60
    assert routed(logits, top_k).balance_loss.item() == pytest.approx(experts / top_k)
    for seed in range(20):
        torch.manual_seed(seed)
        assert 0 < routed(torch.randn(30, experts).double() * 4, top_k).balance_loss < experts / top_k


def test_descending_the_balance_loss_evens_out_the_load():
    moe, h = make(experts=8), batch(400) * 2 + 1
    before = moe(h)[1].tokens_per_expert.max()
    optimiser = torch.optim.SGD([moe.router.weight], lr=0.5)
    for _ in range(60):
        optimiser.zero_grad()
        moe(h.detach())[1].balance_loss.backward()
        optimiser.step()
    assert moe(h)[1].tokens_per_expert.max() < 0.75 * before


def test_z_loss_in_closed_form():
    equal = torch.full((7, 4), 3.0, dtype=torch.float64)  # logsumexp = 3 + ln 4
    assert routed(equal, 1).z_loss.item() == pytest.approx((3 + math.log(4)) ** 2)
    assert routed(equal - 3 - math.log(4), 1).z_loss.item() == pytest.approx(0)


def test_counts_and_entropy_carry_no_gradient():
    stats = make()(batch(4))[1]
    assert not stats.tokens_per_expert.requires_grad
    assert not stats.router_entropy.requires_grad
    assert stats.tokens_per_expert.dtype == torch.int64


# How it is used -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"bias": True, "activation": "gelu", "output_norm": RMSNorm}, {"top_k": 1}])
def test_token_by_token_equals_the_whole_sequence(options):
    moe, h = make(**options), batch(1, 9)
    whole, stats = moe(h)
    with torch.no_grad():
        steps = [moe(h[:, t : t + 1]) for t in range(9)]
    torch.testing.assert_close(torch.cat([out for out, _ in steps], 1), whole.detach(), rtol=1e-13, atol=1e-13)
    assert torch.equal(sum(step.tokens_per_expert for _, step in steps), stats.tokens_per_expert)
    assert sum(step.router_entropy for _, step in steps).item() == pytest.approx(9 * stats.router_entropy.item())
    with torch.inference_mode():
        assert torch.equal(moe(h)[0], whole)
        assert torch.equal(moe(h[:, :1])[0], steps[0][0])


def test_same_input_gives_the_same_bits():
    moe, h = make(dtype=torch.float32), batch(64, dtype=torch.float32)
    first, second = (gradients(moe, h, outputs(moe, h)) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_compiles_without_graph_break_to_the_same_function_and_gradients():
    moe, h = make(dtype=torch.float32, bias=True), batch(3, 7, dtype=torch.float32)
    torch._dynamo.reset()
    compiled = outputs(torch.compile(moe, fullgraph=True, backend="aot_eager"), h)
    eager = outputs(moe, h)
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(gradients(moe, h, compiled), gradients(moe, h, eager))


def test_operators_keep_torch_library_contract():
    moe, h = make(dtype=torch.float32), batch(6, dtype=torch.float32)
    slots, _ = grouped.sort_slots(moe.route(h)[3], EXPERTS)
    for bias in (None, torch.randn(EXPERTS, 2 * HIDDEN, requires_grad=True)):
        args = (h, moe.w_in, bias, slots.ends, slots.token, slots.of_token)
        torch.library.opcheck(torch.ops.siamesenorm.grouped_linear, args)
    units = torch.randn(6 * TOP_K, HIDDEN, requires_grad=True)
    torch.library.opcheck(torch.ops.siamesenorm.grouped_linear, (units, moe.w_out, None, slots.ends, None, None))


def test_the_one_kernel_path_equals_the_slices(monkeypatch):
    """What CUDA runs in bfloat16, run here in float32."""
    moe, h = make(dtype=torch.float32, dim=DIM, hidden=8, bias=True), batch(24, dtype=torch.float32)
    slices = outputs(moe, h)
    expected = gradients(moe, h, slices)
    monkeypatch.setattr(grouped, "has_grouped_mm", lambda x, weight: True)
    kernel = outputs(moe, h)
    torch.testing.assert_close(kernel, slices)
    torch.testing.assert_close(gradients(moe, h, kernel), expected)


def test_torch_func_sees_the_same_gradient():
    moe, h = make(bias=True), batch(6)
    parameters = dict(moe.named_parameters())

    def loss(parameters: dict[str, Tensor]) -> Tensor:
        out, stats = torch.func.functional_call(moe, parameters, (h.detach(),))
        return out.square().sum() + stats.balance_loss

    expected = torch.autograd.grad(loss(parameters), list(parameters.values()))
    torch.testing.assert_close(list(torch.func.grad(loss)(parameters).values()), list(expected))


def test_autocast_computes_experts_in_bfloat16_and_the_router_in_float32():
    moe, h = make(dtype=torch.float32, bias=True), batch(40, dtype=torch.float32)
    expected, stats = moe(h)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        out, rough = moe(h)
    assert out.dtype == torch.bfloat16
    assert torch.equal(rough.tokens_per_expert, stats.tokens_per_expert)
    assert torch.equal(rough.balance_loss, stats.balance_loss)
    torch.testing.assert_close(out.float(), expected, rtol=0.03, atol=0.03)
    ours, exact = (torch.autograd.grad(o.float().square().sum(), [h, *moe.parameters()]) for o in (out, expected))
    for a, b in zip(ours, exact, strict=True):
        assert a.dtype == torch.float32
        assert (a - b).norm() < 0.03 * b.norm()


def test_a_bfloat16_model_stays_near_its_float32_twin():
    moe, h = make(dtype=torch.bfloat16, bias=True), batch(1, 30, dtype=torch.bfloat16)
    exact = make(dtype=torch.bfloat16, bias=True).float()
    expected, stats = exact(h.detach().float())
    out, rough = moe(h)
    out.sum().backward()
    assert out.dtype == moe.w_in.grad.dtype == h.grad.dtype == torch.bfloat16
    assert torch.equal(rough.tokens_per_expert, stats.tokens_per_expert)
    torch.testing.assert_close(out.float(), expected, rtol=0.03, atol=0.03)
    with torch.no_grad():
        torch.testing.assert_close(moe(h[:, :1])[0], out[:, :1].detach(), rtol=0.02, atol=0.02)


def test_meta_construction_counts_the_flops_of_active_experts_alone():
    with torch.device("meta"):
        moe = MoE(DIM, HIDDEN, EXPERTS, TOP_K)
        h = torch.empty(2, 10, DIM, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            moe(h)[0].sum().backward()
    per_token = EXPERTS * DIM + TOP_K * 3 * DIM * HIDDEN
    assert counter.get_total_flops() == 3 * 2 * 20 * per_token
    moe = moe.to_empty(device="cpu")
    torch.manual_seed(0)
    moe.reset_parameters()
    assert moe.w_in.std().item() == pytest.approx(DIM**-0.5, rel=0.1)
    assert moe.w_out.std().item() == pytest.approx(HIDDEN**-0.5, rel=0.1)


def test_weight_roles_name_every_matrix_once():
    moe = make(bias=True)
    assert {role: weight.shape for role, weight in moe.role_weights()} == {
        "router": moe.router.weight.shape,
        "ffn_in": moe.w_in.shape,
        "ffn_out": moe.w_out.shape,
    }
    matrices = {id(p) for name, p in moe.named_parameters() if not name.startswith("b_")}
    assert {id(weight) for _, weight in moe.role_weights()} == matrices


def test_state_dict_round_trip():
    moe, other, h = make(0, bias=True), make(1, bias=True), batch(5)
    assert not torch.equal(moe(h)[0], other(h)[0])
    other.load_state_dict(moe.state_dict())
    assert torch.equal(moe(h)[0], other(h)[0])
    assert set(moe.state_dict()) == {"router.weight", "w_in", "w_out", "b_in", "b_out"}


@pytest.mark.parametrize("topology", ["pre", "siamese"])
def test_stands_as_a_sublayer_in_a_topology(topology):
    moe, attention = make(), nn.Linear(DIM, DIM, dtype=torch.float64)
    residual = Residual(topology, DIM, 1).double()
    h = batch(2, 5)
    flow = residual.start(h)
    flow.through(attention)
    _, stats = flow.through(moe)
    (flow.close().square().sum() + stats.z_loss).backward()
    assert stats.tokens_per_expert.sum() == 2 * 5 * TOP_K
    assert all(p.grad is not None and p.grad.isfinite().all() for p in moe.parameters())
    moe_grad = moe.w_in.grad.clone()

    moe.zero_grad()
    plain = Residual(topology, DIM, 1, fused=False).double()
    plain.load_state_dict(residual.state_dict())
    flow = plain.start(h.detach())
    flow.through(attention)
    _, stats = flow.through(moe)
    (flow.close().square().sum() + stats.z_loss).backward()
    torch.testing.assert_close(moe.w_in.grad, moe_grad)


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
