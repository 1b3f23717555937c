"""Official vision checkpoints: outputs and gradients recorded from the official code, names, shapes and refusals."""

from contextlib import nullcontext

import pytest
import torch

from closeness import assert_same_but_for_rounding
from siamesenorm.interop.official import OfficialError, load_deit
from siamesenorm.residual.kernels import native

from .recorded import assert_comes_back, assert_outputs_and_gradients, read

NAMES = ("deit_siamese", "deit_siamese_distilled")


@pytest.mark.parametrize("kernels", [nullcontext, native.disabled], ids=["kernels", "no kernels"])
@pytest.mark.parametrize("name", NAMES)
def test_outputs_and_gradients_are_the_official_ones(name, kernels):
    config, state, recorded = read(name)
    model = load_deit(state, config)
    assert model.config.topology == "siamese"
    with kernels():
        outputs = model(recorded["input.image"])
        assert_outputs_and_gradients(model, outputs if config["distilled"] else [outputs], recorded)


def test_evaluation_averages_both_heads():
    config, state, recorded = read("deit_siamese_distilled")
    model = load_deit(state, config).eval()
    mean = (recorded["output.0"] + recorded["output.1"]) / 2
    assert_same_but_for_rounding(model(recorded["input.image"]), mean)


@pytest.mark.parametrize("name", NAMES)
def test_back_to_official_is_the_same_file(name):
    assert_comes_back(load_deit, name)


def test_missing_extra_and_misshapen_keys_are_named():
    config, state, _ = read("deit_siamese")
    without = {key: value for key, value in state.items() if key != "blocks.1.input_norm2.bias"}
    with pytest.raises(OfficialError, match=r"missing: blocks\.1\.input_norm2\.bias$"):
        load_deit(without, config)
    with pytest.raises(OfficialError, match=r"unknown: dist_token$"):
        load_deit({**state, "dist_token": torch.zeros(1, 1, 48)}, config)
    with pytest.raises(OfficialError, match=r"wrong shape: pos_embed \(1, 17, 48\) instead of \(1, 65, 48\)$"):
        load_deit(state, {**config, "img_size": 64})


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"init_values": 1e-4}, r"init_values = 0\.0001 is not a known field; known: img_size, "),
        ({"mlp_ratio": "a"}, "mlp_ratio = 'a' is not allowed; it takes a number above 0"),
        ({"depth": 0}, "blocks = 0 is not allowed: input should be greater than or equal to 1$"),
        ({"num_heads": 5}, "heads = 5 is not allowed; it takes a divisor of dim = 48"),
        ({"patch_size": 5}, "patch_size = 5 is not allowed; it takes a divisor of image_size = 32"),
    ],
)
def test_config_fields_that_would_change_the_function_are_refused(change, message):
    config, state, _ = read("deit_siamese")
    with pytest.raises(OfficialError, match=message):
        load_deit(state, {**config, **change})
