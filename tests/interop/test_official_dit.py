"""Official diffusion Transformers: recorded outputs and gradients, facebookresearch's names, refusals."""

import json
from pathlib import Path

import pytest
import torch
from safetensors import safe_open

from siamesenorm.interop.official import OfficialError, load_dit, to_official
from siamesenorm.interop.torchvision_ops import declare_missing_ops
from siamesenorm.layers.sincos import grid_positions
from siamesenorm.models.dit import DiT
from siamesenorm.models.dit_config import DiTConfig

FIXTURE = Path(__file__).parent.parent / "fixtures" / "dit_siamese.safetensors"


def read():
    with safe_open(FIXTURE, "pt") as file:
        config = json.loads(file.metadata()["config"])
        tensors = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
    return config, part(tensors, "state."), tensors


def part(tensors, prefix):
    return {key.removeprefix(prefix): value for key, value in tensors.items() if key.startswith(prefix)}


def test_siamese_outputs_and_gradients_are_the_official_ones():
    config, state, recorded = read()
    model = load_dit(state, config).eval()
    assert model.config.topology == "siamese"
    out = model(recorded["input.x"], recorded["input.t"], recorded["input.y"])
    torch.testing.assert_close(out, recorded["output.0"], atol=1e-5, rtol=0)
    # The recorded loss weighs every number with a fixed random one.
    loss = (out * torch.randn(out.shape, generator=torch.Generator().manual_seed(5))).sum()
    torch.testing.assert_close(loss[None], recorded["output.loss"], atol=1e-3, rtol=1e-5)
    loss.backward()
    grads, expected = to_official(model, grads=True), part(recorded, "grad.")
    assert grads.keys() == expected.keys()
    for key, grad in grads.items():
        assert (grad - expected[key]).norm() <= 1e-4 * expected[key].norm(), key


def test_back_to_official_is_the_same_file():
    config, state, _ = read()
    back = to_official(load_dit(state, config))
    assert back.keys() == state.keys()
    for key in state:
        assert torch.equal(back[key], state[key]), key


def without_siamese_norms():
    config, state, _ = read()
    return config, {key: value for key, value in state.items() if "prenorm" not in key and "postnorm" not in key}


def test_a_wrong_state_dict_is_refused_by_the_names_of_its_keys():
    config, state = without_siamese_norms()
    with pytest.raises(OfficialError, match=r"missing: blocks\.1\.mlp\.fc1\.bias"):
        load_dit({key: value for key, value in state.items() if key != "blocks.1.mlp.fc1.bias"}, config)
    with pytest.raises(OfficialError, match=r"unknown: blocks\.9\.surprise"):
        load_dit({**state, "blocks.9.surprise": torch.zeros(1)}, config)
    with pytest.raises(OfficialError, match=r"wrong shape: final_layer\.linear\.bias \(3,\) instead of \(32,\)"):
        load_dit({**state, "final_layer.linear.bias": torch.zeros(3)}, config)
    with pytest.raises(OfficialError, match="unknown fields width; known fields: input_size"):
        load_dit(state, {**config, "width": 3})
    with pytest.raises(OfficialError, match="heads = 5 is not allowed"):
        load_dit(state, {**config, "num_heads": 5})


def test_topologies_without_an_official_model_have_no_official_names():
    config = DiTConfig(input_size=4, patch_size=2, channels=1, classes=2, dim=8, blocks=1, heads=2, ffn_dim=8)
    with pytest.raises(OfficialError, match="post has no official"):
        to_official(DiT(config.model_copy(update={"topology": "post"})))


def test_facebookresearch_weights_in_pre_give_what_diffusers_gives():
    """diffusers' own DiT with the same numbers under its names."""
    config, state = without_siamese_norms()
    state["pos_embed"] = grid_positions(4, 48)[None]
    declare_missing_ops()
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
        torch.testing.assert_close(ours(x, t, y), expected, rtol=0, atol=1e-5)


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
