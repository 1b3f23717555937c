"""Presets and costs of vision models, against published sizes and against what torch counts."""

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from typer.testing import CliRunner

from siamesenorm.cli import app
from siamesenorm.models.families import FAMILIES
from siamesenorm.models.vit import VIT_PRESETS, VisionTransformer, count_vit, vit_preset

# arXiv 2012.12877, table 1, and timm's models for the last digits.
PUBLISHED = {
    "deit-tiny": 5717416,
    "deit-small": 22050664,
    "deit-base": 86567656,
    "deit-tiny-distilled": 5910800,
    "deit-small-distilled": 22436432,
    "deit-base-distilled": 87338192,
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_pre_norm_presets_have_the_published_size(name):
    assert count_vit(vit_preset(name, topology="pre")).total == PUBLISHED[name]


def test_siamese_adds_four_layer_norms_a_block_and_two_at_the_end():
    found = count_vit(vit_preset("deit-tiny"))
    assert found.total == PUBLISHED["deit-tiny"] + found.topology_extra
    assert found.topology_extra == (12 * 4 + 2) * 2 * 192


@pytest.mark.parametrize("distilled", [False, True])
def test_flops_are_those_that_torch_counts(distilled):
    config = vit_preset("vit-32", topology="pre", distilled=distilled)
    with torch.device("meta"):
        model = VisionTransformer(config).eval()
        with FlopCounterMode(display=False) as counter:
            model(torch.empty(1, 3, 32, 32))
    attention = 4 * config.tokens**2 * config.dim * config.blocks
    assert count_vit(config).flops_forward in (
        pytest.approx(counter.get_total_flops(), rel=1e-6),
        pytest.approx(counter.get_total_flops() + attention, rel=1e-6),  # where torch does not know the kernel
    )


def test_command_explains_them():
    assert FAMILIES["vision"].presets is VIT_PRESETS
    explained = CliRunner().invoke(app, ["models", "deit-tiny", "--topology", "pre"])
    assert explained.exit_code == 0
    assert "5,717,416" in explained.stdout
    assert "FLOPs per image" in explained.stdout
    with pytest.raises(ValueError, match="model: unknown name 'deit-9'; known names: vit-8"):
        vit_preset("deit-9")
