"""What the router reports of a batch: the losses that keep experts balanced, counts and entropy."""

import math

import pytest
import torch
from torch import Tensor, nn

from siamesenorm.layers.moe import MoE, RouterStats

from .experts import batch, make


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
