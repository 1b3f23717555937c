"""Official diffusion Transformers: recorded outputs and gradients, facebookresearch's names, refusals."""

import pytest
import torch

from closeness import ROUNDING, assert_same_but_for_rounding, largest
from siamesenorm.interop.official import OfficialError, load_dit
from siamesenorm.layers.patch import grid_positions

from .recorded import assert_comes_back, assert_outputs_and_gradients, read


def test_siamese_outputs_and_gradients_are_the_official_ones():
    config, state, recorded = read("dit_siamese")
    model = load_dit(state, config).eval()
    assert model.config.topology == "siamese"
    x, t, y = (recorded[f"input.{name}"] for name in "xty")
    tolerance = ROUNDING + what_one_rounding_of_angles_moves(model, x, t, y)
    assert tolerance < 1e-4
    assert_outputs_and_gradients(model, [model(x, t, y)], recorded, tolerance)


def what_one_rounding_of_angles_moves(model, x, t, y):
    """In units of the largest output. Angles of some hundred radians are rounded to 1e-7 of their size, and no two
    kinds of CPU round the exponentials in them alike."""
    with torch.no_grad():
        exact = model.double()(x.double(), t.double(), y)
        moved = [largest(model(x.double(), t * (1 + sign * 2**-23), y) - exact) for sign in (-1.0, 1.0)]
    model.float()
    return max(moved) / largest(exact)


def test_back_to_official_is_the_same_file():
    assert_comes_back(load_dit, "dit_siamese")


def without_siamese_norms():
    config, state, _ = read("dit_siamese")
    return config, {key: value for key, value in state.items() if "prenorm" not in key and "postnorm" not in key}


def test_a_wrong_state_dict_is_refused_by_the_names_of_its_keys():
    config, state = without_siamese_norms()
    with pytest.raises(OfficialError, match=r"missing: blocks\.1\.mlp\.fc1\.bias"):
        load_dit({key: value for key, value in state.items() if key != "blocks.1.mlp.fc1.bias"}, config)
    with pytest.raises(OfficialError, match=r"unknown: blocks\.9\.surprise"):
        load_dit({**state, "blocks.9.surprise": torch.zeros(1)}, config)
    with pytest.raises(OfficialError, match=r"wrong shape: final_layer\.linear\.bias \(3,\) instead of \(32,\)"):
        load_dit({**state, "final_layer.linear.bias": torch.zeros(3)}, config)
    with pytest.raises(OfficialError, match="width = 3 is not a known field; known: input_size"):
        load_dit(state, {**config, "width": 3})
    with pytest.raises(OfficialError, match="heads = 5 is not allowed"):
        load_dit(state, {**config, "num_heads": 5})


def test_facebookresearch_weights_in_pre_give_what_diffusers_gives():
    """diffusers' own DiT with the same numbers under its names."""
    config, state = without_siamese_norms()
    state["pos_embed"] = grid_positions(4, 48)[None]
    diffusers = pytest.importorskip("diffusers")
    theirs = diffusers.DiTTransformer2DModel(
        num_attention_heads=4,
        attention_head_dim=12,
        in_channels=4,
        out_channels=8,
        num_layers=3,
        sample_size=8,
        patch_size=2,
        num_embeds_ada_norm=7,
        norm_eps=1e-6,
    ).eval()
    theirs.load_state_dict(diffusers_names(state), strict=True)
    for module in theirs.modules():  # its timesteps' frequencies end at 1/10000 one step before the official ones
        if hasattr(module, "time_proj"):
            module.time_proj.downscale_freq_shift = 0
    ours = load_dit(state, config).eval()
    assert ours.config.topology == "pre"
    x, t, y = torch.randn(3, 4, 8, 8), torch.tensor([0, 413, 999]), torch.tensor([0, 6, 7])
    with torch.no_grad():
        expected = theirs(x, timestep=t, class_labels=y, return_dict=False)[0]
        assert_same_but_for_rounding(ours(x, t, y), expected)


def diffusers_names(state):
    """The official numbers as diffusers keeps them: the condition's embeddings in every block, q, k and v apart."""
    made = {
        "pos_embed.proj.weight": state["x_embedder.proj.weight"],
        "pos_embed.proj.bias": state["x_embedder.proj.bias"],
        "proj_out_1.weight": state["final_layer.adaLN_modulation.1.weight"],
        "proj_out_1.bias": state["final_layer.adaLN_modulation.1.bias"],
        "proj_out_2.weight": state["final_layer.linear.weight"],
        "proj_out_2.bias": state["final_layer.linear.bias"],
    }
    for block in range(3):
        here, there = f"blocks.{block}.", f"transformer_blocks.{block}."
        condition = f"{there}norm1.emb."
        made[f"{condition}class_embedder.embedding_table.weight"] = state["y_embedder.embedding_table.weight"]
        for leaf in ("weight", "bias"):
            made[f"{condition}timestep_embedder.linear_1.{leaf}"] = state[f"t_embedder.mlp.0.{leaf}"]
            made[f"{condition}timestep_embedder.linear_2.{leaf}"] = state[f"t_embedder.mlp.2.{leaf}"]
            made[f"{there}norm1.linear.{leaf}"] = state[f"{here}adaLN_modulation.1.{leaf}"]
            for name, rows in zip("qkv", state[f"{here}attn.qkv.{leaf}"].chunk(3), strict=True):
                made[f"{there}attn1.to_{name}.{leaf}"] = rows
            made[f"{there}attn1.to_out.0.{leaf}"] = state[f"{here}attn.proj.{leaf}"]
            made[f"{there}ff.net.0.proj.{leaf}"] = state[f"{here}mlp.fc1.{leaf}"]
            made[f"{there}ff.net.2.{leaf}"] = state[f"{here}mlp.fc2.{leaf}"]
    return made
