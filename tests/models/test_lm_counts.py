"""Presets of language models at their published sizes, and counts against the real thing."""

import json

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from siamesenorm.models.lm import PRESETS, LanguageModel, count_lm, preset

from .small import config

PUBLISHED = {
    "lm-390m-10x1280": 390e6,
    "lm-390m-17x1024": 390e6,
    "lm-390m-33x768": 390e6,
    "lm-390m-80x512": 390e6,
    "lm-1.3b": 1.3e9,
    "moe-15b-a2b": 15e9,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_papers_size(name):
    found = count_lm(preset(name, topology="pre"))
    assert found.total == pytest.approx(PUBLISHED[name], rel=0.02)
    assert found.active == (pytest.approx(2e9, rel=0.03) if "moe" in name else found.total)


@pytest.mark.parametrize("name", PUBLISHED)
def test_siamese_costs_under_a_thousandth_of_the_parameters(name):
    found = count_lm(preset(name, topology="siamese"))
    assert 0 < found.topology_extra < 1e-3 * found.total


def test_size_by_hand():
    found = count_lm(preset("lm-1.3b", topology="pre"))
    d, f, L, V = 2048, 8192, 16, 50304
    norms = L * (2 * d + 2 * 128) + d
    assert found.total == 2 * V * d + L * (4 * d * d + 3 * d * f) + norms
    assert found.topology == L * 2 * d + d


@pytest.mark.parametrize("topology", ["pre", "siamese", "hyper"])
@pytest.mark.parametrize("moe", [None, {"experts": 4, "top_k": 2, "expert_dim": 16}])
def test_counts_are_those_of_a_real_model(topology, moe):
    chosen = config(topology, moe=moe)
    found, model = count_lm(chosen), LanguageModel(chosen)
    assert found.total == sum(p.numel() for p in model.parameters())
    assert found.topology == sum(p.numel() for p in model.residual_parameters().values())
    idle = 0 if moe is None else 3 * 2 * (3 * 16 * 32)
    assert found.active == found.total - idle


def test_flops_are_those_that_torch_counts():
    chosen, length = config("pre", qk_norm="none"), 32
    model = LanguageModel(chosen)
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        model(torch.zeros(1, length, dtype=torch.long))
    # torch counts causal attention in full; we count the half that is seen.
    attention = 4 * 3 * 32 * length
    seen = attention * (length + 1) / (2 * length)
    expected = counter.get_total_flops() / length
    assert count_lm(chosen, length=length).flops_forward in (
        pytest.approx(expected - attention + seen, rel=1e-6),
        pytest.approx(expected + seen, rel=1e-6),  # where torch does not know the CPU's attention kernel
    )


def test_command():
    import typer

    from siamesenorm.commands.models import models

    app = typer.Typer()
    app.command()(models)
    run = CliRunner().invoke
    listed = run(app, [])
    assert listed.exit_code == 0
    assert all(name in listed.output for name in PRESETS)
    one = json.loads(run(app, ["lm-1.3b", "--json", "--topology", "pre"]).output)
    assert one["config"]["topology"] == "pre"
    assert one["counts"]["total"] == count_lm(preset("lm-1.3b", topology="pre")).total
    assert "1,279,993,856" in run(app, ["lm-1.3b"]).output
    with pytest.raises(ValueError, match="model: unknown name 'lm-9b'; known names: lm-nano"):
        preset("lm-9b")
