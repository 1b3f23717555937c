"""GatedNorm: N(u) * sigmoid(W_2 silu(W_1 N(u))), for every topology."""

import torch
from torch.testing import assert_close

from siamesenorm.residual import NormSpec, Residual
from siamesenorm.residual.norms import GatedNorm, RMSNorm

from .stacks import PAIR, D, every_row, make, make_sublayers, randomise


def test_the_equation():
    norm = GatedNorm(8, eps=1e-3, rank=3).double()
    randomise(norm)
    x = torch.randn(5, 8, dtype=torch.float64)
    normed = x / torch.sqrt((x * x).mean(-1, keepdim=True) + 1e-3) * norm.weight
    low = normed @ norm.W_1.T
    expected = normed / (1 + torch.exp(-(low / (1 + torch.exp(-low))) @ norm.W_2.T))
    assert_close(norm(x), expected)


def test_every_gate_starts_at_one_half():
    x = torch.randn(5, 8)
    assert_close(GatedNorm(8)(x), RMSNorm(8)(x) / 2)


@every_row
def test_every_topology_takes_it(row):
    """It runs where the plain norm runs, and gradients reach its gates."""
    topology, sublayers = make(row, norm="gated"), make_sublayers([PAIR] * 2)
    randomise(topology)
    x = torch.randn(2, 3, D, dtype=torch.float64)
    gated = [module for module in topology.modules() if isinstance(module, GatedNorm)]
    plain = [module for module in make(row).modules() if type(module) is RMSNorm and module.weight is not None]
    assert len(gated) == len(plain)
    topology(x, sublayers).square().sum().backward()
    assert all(module.W_1.grad.abs().sum() > 0 and module.W_2.grad.abs().sum() > 0 for module in gated)


def test_norms_inside_sublayers_have_no_gates():
    residual = Residual("hybrid", 16, 2, norm=NormSpec("gated", eps=1e-4), needs="waived")
    inside = residual.attention_norms(residual.places[0], 8, 2)
    assert type(inside.q) is RMSNorm
    assert inside.q.eps == 1e-4
