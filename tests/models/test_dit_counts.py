"""Costs of diffusion Transformers, against published ones and against what torch counts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from siamesenorm.models.dit import DiT, count_dit, dit_preset

# arXiv 2212.09748, table 4: Gflops of a forward pass, a product and a sum being one.
GFLOPS = {"s-8": 0.36, "s-4": 1.41, "s-2": 6.06, "b-4": 5.56, "b-2": 23.01, "l-4": 19.70, "l-2": 80.71, "xl-2": 118.64}


@pytest.mark.parametrize("name", GFLOPS)
def test_flops_are_the_published_ones(name):
    found = count_dit(dit_preset(f"dit-{name}", topology="pre"))
    assert found.flops_forward / 2e9 == pytest.approx(GFLOPS[name], rel=0.02)
    assert found.flops_training == 3 * found.flops_forward


@pytest.mark.parametrize("topology", ["pre", "siamese"])
def test_flops_and_parameters_are_those_of_the_model(topology):
    config = dit_preset("dit-digits", topology=topology)
    with torch.device("meta"):
        model = DiT(config).eval()
        with FlopCounterMode(display=False) as counter:
            model(torch.empty(1, 1, 8, 8), torch.zeros(1), torch.zeros(1, dtype=torch.long))
    found, attention = count_dit(config), 4 * config.tokens**2 * config.dim * config.blocks
    assert found.flops_forward in (
        pytest.approx(counter.get_total_flops(), rel=0.01),  # the timestep's first projection is not counted
        pytest.approx(counter.get_total_flops() + attention, rel=0.01),  # where torch does not know the kernel
    )
    assert found.total == found.active == sum(parameter.numel() for parameter in model.parameters())
    assert found.topology_extra == (0 if topology == "pre" else (4 * 6 + 2) * 2 * 64)
