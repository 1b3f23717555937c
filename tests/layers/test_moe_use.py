"""The mixture of experts in use: decoding, compilation, low precision, meta device, state dicts, topologies."""

import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from siamesenorm import Residual
from siamesenorm.layers.moe import MoE
from siamesenorm.residual import RMSNorm

from .experts import DIM, EXPERTS, HIDDEN, TOP_K, batch, gradients, make, outputs


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


def test_compiles_without_graph_break_to_the_same_function_and_gradients():
    moe, h = make(dtype=torch.float32, bias=True), batch(3, 7, dtype=torch.float32)
    torch._dynamo.reset()
    compiled = outputs(torch.compile(moe, fullgraph=True, backend="aot_eager"), h)
    eager = outputs(moe, h)
    torch.testing.assert_close(compiled, eager)
    torch.testing.assert_close(gradients(moe, h, compiled), gradients(moe, h, eager))


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
    torch.testing.assert_close(out.float(), expected, rtol=0.06, atol=0.06)
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
    torch.testing.assert_close(out.float(), expected, rtol=0.06, atol=0.06)
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
