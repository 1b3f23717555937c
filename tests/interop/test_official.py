"""Official checkpoints: outputs and gradients recorded from the official code, names, shapes and refusals."""

import pytest
import torch

from siamesenorm.interop.official import load_deit, load_dit, load_lm
from siamesenorm.interop.olmo_config import OfficialError, parse_special

from .recorded import assert_comes_back, assert_outputs_and_gradients, read

TOPOLOGY = {
    "lm_hybrid_pre": ("siamese:form=hybrid_pre", "none"),
    "lm_hybridnorm": ("hybrid", "none"),
    "lm_hybridnorm_star": ("hybrid_star", "none"),
    "lm_post": ("post", "none"),
    "lm_pre": ("pre", "none"),
    "lm_pre_qknorm": ("pre", "head"),
}


@pytest.mark.parametrize("name", TOPOLOGY)
def test_outputs_and_gradients_are_the_official_ones(name):
    config, state, recorded = read(name)
    model = load_lm(state, config)
    assert (model.config.topology, model.config.qk_norm) == TOPOLOGY[name]
    assert_outputs_and_gradients(model, [model(recorded["input.input_ids"]).logits], recorded)


@pytest.mark.parametrize("name", TOPOLOGY)
def test_back_to_official_is_the_same_file(name):
    assert_comes_back(load_lm, name)


def test_loading_copies_and_takes_hub_prefixes():
    config, state, _ = read("lm_pre")
    model = load_lm({f"model.{key}": value for key, value in state.items()}, config)
    torch.nn.init.zeros_(model.embedding.weight)
    assert state["transformer.wte.weight"].abs().sum() > 0


def test_tied_head():
    config, state, recorded = read("lm_pre")
    head = state.pop("transformer.ff_out.weight")
    model = load_lm(state, {**config, "weight_tying": True})
    hidden = model(recorded["input.input_ids"]).hidden
    torch.testing.assert_close(model.logits(hidden), hidden @ state["transformer.wte.weight"].T)
    with pytest.raises(OfficialError, match=r"unknown: transformer\.ff_out\.weight"):
        load_lm({**state, "transformer.ff_out.weight": head}, {**config, "weight_tying": True})


def test_missing_extra_and_misshapen_keys_are_named():
    config, state, _ = read("lm_hybrid_pre")
    without = {key: value for key, value in state.items() if key != "transformer.blocks.1.c1"}
    with pytest.raises(OfficialError, match=r"missing: transformer\.blocks\.1\.c1$"):
        load_lm(without, config)
    with pytest.raises(OfficialError, match=r"unknown: transformer\.blocks\.0\.bogus$"):
        load_lm({**state, "transformer.blocks.0.bogus": torch.zeros(1)}, config)
    with pytest.raises(OfficialError, match=r"wrong shape: transformer\.ln_f\.weight \(3,\) instead of \(64,\)$"):
        load_lm({**state, "transformer.ln_f.weight": torch.zeros(3)}, config)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"alibi": True}, "alibi = True is not supported"),
        ({"block_type": "llama"}, "block_type = 'llama' is not supported; it takes 'sequential'"),
        ({"clip_qkv": 8.0}, r"clip_qkv = 8\.0 is not supported"),
        ({"activation_type": "relu"}, "activation_type = 'relu' is not supported; it takes swiglu, gelu"),
        ({"n_layers": None}, "n_layers = None is not allowed"),
        ({"n_layers": True}, "n_layers = True is not allowed"),
        ({"n_heads": 5}, "heads = 5 is not allowed; it takes a divisor of dim = 64"),
        ({"mlp_hidden_size": "x"}, "mlp_hidden_size = 'x' is not allowed; it takes a whole number from 1"),
        ({"mlp_ratio": "x"}, "mlp_ratio = 'x' is not allowed; it takes a number above 0"),
        ({"layer_norm_eps": -1}, "norm_eps = -1 is not allowed: input should be greater than 0"),
        ({"brand_new": 1}, "brand_new = 1 is not a known field"),
        ({"ffn_residual_after_norm": True}, "are no known topology"),
        ({"use_value_norm": True}, "use_value_norm = True is not supported with topology pre"),
    ],
)
def test_configs_that_would_load_as_another_model_are_refused(change, message):
    config, state, _ = read("lm_pre")
    with pytest.raises(OfficialError, match=message) as refused:
        load_lm(state, {**config, **change})
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("load", "name"), [(load_lm, "lm_pre"), (load_deit, "deit_siamese"), (load_dit, "dit_siamese")]
)
def test_what_is_no_config_and_no_state_dict_is_refused(load, name):
    config, state, _ = read(name)
    for wrong in (None, [1], {1: 2}):
        with pytest.raises(OfficialError, match="it takes a mapping of names to values"):
            load(state, wrong)
    with pytest.raises(OfficialError, match="state dict: not a tensor: "):
        load(dict.fromkeys(state, 1), config)


def test_special_config_is_data_not_code(tmp_path):
    assert parse_special("_{0:{'attn_norm':True,'ffn_residual':False}}_") == {
        0: {"attn_norm": True, "ffn_after": False}
    }
    assert parse_special(None) == {}
    victim = tmp_path / "made"
    for text in (f"_open({str(victim)!r}, 'w')_", "_{0: 1}_", "_{0: {'attn_norm': 2}}_", "_{'a': {}}_", "_{_", "_[1]_"):
        with pytest.raises(OfficialError, match="norm_pos_special_config"):
            parse_special(text)
    assert not victim.exists()
