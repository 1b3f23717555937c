"""The coordinate check: flat where CompleteP is claimed, steep in the standard parametrisation; and its command."""

from __future__ import annotations

import importlib
import json
import math
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from siamesenorm.cli import main
from siamesenorm.lab.inspection import coordinates
from siamesenorm.lab.inspection.coordinates import Axis, Coordinate, check_coordinates, heights, scaled, slope
from siamesenorm.models.lm import LanguageModel, LMConfig
from siamesenorm.train.config import OptimizerConfig

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
benchmark = importlib.import_module("coordinates")

CLAIMED = [
    *(("language", "adamw", name) for name in ("pre", "siamese", "siamese:form=hybrid_pre", "post", "hyper")),
    *(("language", "adamw", name) for name in ("attnres", "gr", "x0")),
    *(("language", "muon", name) for name in ("pre", "siamese")),
    *((family, "adamw", "siamese") for family in ("vision", "diffusion")),
]
NOISE = 0.4
"""Slopes that a single draw of first weights is not told from 0 by; the standard parametrisation's are beyond."""


@pytest.fixture(autouse=True)
def _small(monkeypatch):
    monkeypatch.setitem(benchmark.SHAPE, "blocks", 2)
    monkeypatch.setattr(coordinates, "FLAT", NOISE)
    monkeypatch.setattr(coordinates, "SLOWEST", -0.5)


def check(family, topology, parametrization, optimizer, lr=3e-3, **options):
    base = {"parametrization": parametrization, "base_width": 32, "base_depth": 2}
    model, batches = benchmark.FAMILIES[family](topology, **base)
    config = OptimizerConfig(lr=lr, kind=optimizer)
    options = {"widths": (1, 4), "depths": (1, 4), **options}
    return check_coordinates(model, benchmark.loss_of, batches, config, **options)


@pytest.mark.parametrize(("family", "optimizer", "topology"), CLAIMED)
def test_claimed_combinations_are_flat(family, optimizer, topology):
    found = check(family, topology, "completep", optimizer)
    assert [axis.steepest for axis in found.axes] == [None, None]


@pytest.mark.parametrize(("optimizer", "topology"), [("adamw", "pre"), ("adamw", "siamese"), ("muon", "siamese")])
def test_the_standard_parametrisation_is_not(optimizer, topology):
    """Updates grow with width, and along the stream with depth."""
    width, depth = check("language", topology, "standard", optimizer).axes
    assert not width.is_flat
    assert not depth.is_flat
    found = {each.name: each.update_slope for each in width.coordinates}
    assert found["ffn 1"] > 0.3
    stream = {each.name: each.update_slope for each in depth.coordinates if each.kind == "stream"}
    assert max(stream.values()) > 0.4


def test_without_a_branch_factor_a_siamese_pair_is_not_flat():
    """Nor with one on a single stream: so it is on both."""
    for streams in ((), ("x",)):
        found = check("language", "siamese", "completep", "adamw", widths=(1,), prepare=benchmark.only(*streams))
        assert not found.is_flat, streams


def test_slopes_are_of_logarithms():
    assert slope((1, 2, 4), [3.0, 6.0, 12.0]) == pytest.approx(1)
    assert slope((16, 64), [2.0, 1.0]) == pytest.approx(-0.5)
    assert slope((1, 2), [0.0, 0.0]) == 0
    assert slope((1, 2), [0.0, 1.0]) is None
    assert slope((1, 2), [1.0, math.nan]) is None


@pytest.mark.parametrize(
    ("kind", "size", "update", "flat"),
    [
        ("sublayer", 0.3, -0.3, True),
        ("sublayer", 0.5, 0.0, False),
        ("sublayer", 0.0, -0.5, False),
        ("stream", -0.5, -0.5, True),
        ("stream", 0.0, 0.5, False),
        ("output", -0.5, -0.4, True),
        ("output", 0.0, -0.6, False),
        ("hidden", 0.0, None, False),
    ],
)
def test_what_is_flat(kind, size, update, flat):
    """Streams may fall, the output may fall slower than an untaught head's, and nothing may be no number."""
    each = Coordinate(name="a", kind=kind, sizes=(1,), updates=(1,), size_slope=size, update_slope=update)
    axis = Axis(direction="width", multiples=(1, 2), values=(1, 2), coordinates=(each,))
    assert each.is_flat == axis.is_flat == flat
    assert (axis.steepest is None) == flat


def test_heights_are_whole_blocks_of_the_smallest():
    assert heights(1) == (1.0,)
    assert heights(2) == (0.5, 1.0)
    assert heights(12) == (4 / 12, 8 / 12, 1.0)


def test_wider_models_have_more_heads_of_the_same_size():
    shape = {"vocab_size": 8, "dim": 8, "blocks": 1, "heads": 2, "kv_heads": 1, "ffn_dim": 6, "head_dim": 6}
    model = LanguageModel(LMConfig(**shape, moe={"experts": 2, "top_k": 1, "expert_dim": 5})).double()
    wide = scaled(model, "width", 3, seed=0)
    assert (wide.config.dim, wide.config.heads, wide.config.kv_heads, wide.config.ffn_dim) == (24, 6, 3, 18)
    assert (wide.config.dim_per_head, wide.config.moe.expert_dim, wide.config.moe.experts) == (6, 15, 2)
    assert next(wide.parameters()).dtype == torch.float64
    assert scaled(model, "depth", 3, seed=0).config.blocks == 3


def test_looking_leaves_no_hooks_and_tied_heads_are_seen():
    model, batches = benchmark.language("pre")
    tied = LanguageModel(LMConfig(**{**model.config.model_dump(), "tied": True}), seed=0)
    seen = {}
    found = check_coordinates(
        tied, benchmark.loss_of, batches[:1], OptimizerConfig(lr=1e-3), widths=(1, 2), depths=(1,),
        prepare=lambda made: seen.setdefault("model", made),
    )  # fmt: skip
    assert "output" in {each.name for each in found.axes[0].coordinates}
    hooks = [module for module in seen["model"].modules() if isinstance(module, nn.Module) and module._forward_hooks]
    assert not hooks


# The command ---------------------------------------------------------------------------------------------

SMALL = ["dim=8", "blocks=1", "heads=2", "ffn_dim=12", "train.batch_size=2", "sequence_length=8", "--steps", "1"]


def test_the_command_writes_numbers_and_a_page(tmp_path, capsys):
    out = tmp_path / "out"
    recipe = ["inspect", "lm-tiny", "--coordinates", *SMALL, "--widths", "1,2", "--depths", "1"]
    assert main([*recipe, "--out", str(out)]) == 0
    said = capsys.readouterr().out
    assert "over width" in said
    assert "over depth" not in said
    found = json.loads((out / "coordinates.json").read_text())
    assert found["source"]["recipe"] == "lm-tiny"
    assert found["axes"][0]["values"] == [8, 16]
    page = (out / "coordinates.html").read_text()
    assert "Coordinate check of siamese" in page
    assert main([*recipe, "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["axes"] == found["axes"]


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--coordinates", "--widths", "2,1"], "--widths: '2,1' is not allowed; it takes rising whole numbers"),
        (["--coordinates", "--depths", "1,x"], "--depths: 'x' is not allowed"),
        (["--coordinates", "--widths", "1", "--depths", "1"], "one takes two sizes"),
        (["--coordinates", "--widths", "0,1"], "--widths: '0,1' is not allowed"),
        (["--coordinates", "--text", "x.txt"], "--text: 'x.txt' is not allowed with --coordinates"),
        (["--coordinates", "parametrization=completep"], "base_width"),
        (["--widths", "1,2"], "--widths: '1,2' is not allowed without --coordinates"),
        (["dim=8"], "'dim=8' is not allowed; only --coordinates takes fields to change"),
    ],
)
def test_bad_input_is_one_sentence(tmp_path, monkeypatch, capsys, arguments, sentence):
    monkeypatch.chdir(tmp_path)
    assert main(["inspect", "lm-tiny", *arguments]) == 2
    captured = capsys.readouterr()
    assert sentence in captured.err
    assert not list(tmp_path.iterdir())
