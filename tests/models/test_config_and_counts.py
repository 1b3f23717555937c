"""The configuration's checks and round trip, the presets' published sizes, and counts against the real thing."""

import json

import pytest
import torch
from pydantic import ValidationError
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from siamesenorm.models.counts import count
from siamesenorm.models.lm import LanguageModel
from siamesenorm.models.lm_config import LMConfig, MoEConfig
from siamesenorm.models.presets import PRESETS, preset

from .small import config, stirred


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"heads": 5}, "heads = 5 is not allowed; it takes a divisor of dim = 32"),
        ({"kv_heads": 3}, "kv_heads = 3 is not allowed; it takes a divisor of heads = 4"),
        ({"head_dim": 7}, "head_dim = 7 is not allowed; rotary positions take an even number"),
        ({"topology": "siames"}, "unknown name 'siames'"),
        ({"topology": "siamese:form=x"}, "option form = 'x' is not allowed"),
        ({"dropout": 1.0}, "less than 1"),
        ({"widht": 3}, "Extra inputs are not permitted"),
        ({"moe": {"experts": 2, "top_k": 3, "expert_dim": 8}}, "top_k = 3 is not allowed"),
    ],
)
def test_wrong_fields_are_named(changes, message):
    with pytest.raises(ValidationError, match=message):
        config(**changes)


def test_round_trip_frozen_and_documented():
    original = preset("moe-micro", topology="siamese:form=hybrid_pre")
    assert LMConfig.model_validate_json(original.model_dump_json()) == original
    with pytest.raises(ValidationError):
        original.dim = 3
    for model in (LMConfig, MoEConfig):
        assert all(field.description for field in model.model_fields.values())


PUBLISHED = {
    "lm-390m-10": 390e6,
    "lm-390m-17": 390e6,
    "lm-390m-33": 390e6,
    "lm-390m-80": 390e6,
    "lm-1.3b": 1.3e9,
    "moe-15b-a2b": 15e9,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_presets_have_the_papers_size(name):
    found = count(preset(name, topology="pre"))
    assert found.total == pytest.approx(PUBLISHED[name], rel=0.02)
    assert found.active == (pytest.approx(2e9, rel=0.03) if "moe" in name else found.total)


@pytest.mark.parametrize("name", PUBLISHED)
def test_siamese_costs_under_a_thousandth_of_the_parameters(name):
    found = count(preset(name, topology="siamese"))
    assert 0 < found.topology_extra < 1e-3 * found.total


def test_size_by_hand():
    found = count(preset("lm-1.3b", topology="pre"))
    d, f, L, V = 2048, 8192, 16, 50304
    norms = L * (2 * d + 2 * 128) + d
    assert found.total == 2 * V * d + L * (4 * d * d + 3 * d * f) + norms
    assert found.topology == L * 2 * d + d


@pytest.mark.parametrize("topology", ["pre", "siamese", "hyper"])
@pytest.mark.parametrize("moe", [None, {"experts": 4, "top_k": 2, "expert_dim": 16}])
def test_counts_are_those_of_a_real_model(topology, moe):
    chosen = config(topology, moe=moe)
    found, model = count(chosen), LanguageModel(chosen)
    assert found.total == sum(p.numel() for p in model.parameters())
    assert found.topology == sum(p.numel() for p in model.residual.parameters())
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
    assert count(chosen, length=length).flops_forward in (
        pytest.approx(expected - attention + seen, rel=1e-6),
        pytest.approx(expected + seen, rel=1e-6),  # where torch does not know the CPU's attention kernel
    )


@pytest.mark.parametrize("topology", ["pre", "siamese"])
def test_activation_estimate_is_near_what_autograd_keeps(topology):
    model = stirred(topology, dim=64, ffn_dim=192, heads=4, kv_heads=4, head_dim=16, blocks=4)
    storages: dict[int, int] = {}

    def note(tensor):
        if not isinstance(tensor, torch.nn.Parameter):
            storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
        return tensor

    weights = {p.untyped_storage().data_ptr() for p in model.parameters()}
    tokens = torch.zeros(4, 64, dtype=torch.long)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        kept = model(tokens).hidden
    per_token = sum(size for at, size in storages.items() if at not in weights) / tokens.numel()
    assert kept is not None
    assert count(model.config).activation_bytes == pytest.approx(per_token, rel=0.15)


def test_moe_adds_its_losses_with_the_configs_weights():
    moe = {"experts": 4, "top_k": 2, "expert_dim": 16}
    model = LanguageModel(config(moe=moe), seed=0)
    ids = torch.randint(0, 50, (2, 8))
    output = model(ids, labels=ids)
    balance = sum(stats.balance_loss for stats in output.experts) / 3
    z = sum(stats.z_loss for stats in output.experts) / 3
    torch.testing.assert_close(output.loss, output.cross_entropy + 0.01 * balance + 0.001 * z)
    output.loss.backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert all(block.ffn.router.weight.grad.abs().sum() > 0 for block in model.blocks)


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
    assert one["counts"]["total"] == count(preset("lm-1.3b", topology="pre")).total
    assert "1,279,993,856" in run(app, ["lm-1.3b"]).output
    wrong = run(app, ["lm-9b"])
    assert wrong.exit_code == 2
    assert "known models" in wrong.output
    with pytest.raises(ValueError, match="model: unknown name 'lm-9b'; known names: lm-nano"):
        preset("lm-9b")
