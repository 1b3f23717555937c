"""Every model of ours either goes to the official form and comes back as the same function, or is refused by name."""

import itertools

import pytest
import torch

from residual.table import ROWS
from siamesenorm.interop.official import OfficialError, load_deit, load_dit, load_lm, to_official
from siamesenorm.models.dit import DiT, DiTConfig
from siamesenorm.models.lm import LanguageModel, LMConfig, MoEConfig
from siamesenorm.models.vit import VisionTransformer, ViTConfig

TEXTS = [row.text for row in ROWS] + [
    "siamese:form=post_pre,x=post:norm_at=start,input_norm=true,final_norm=true",
    "siamese:x=hybrid",
    "siamese:x=hybrid_star",
    "siamese:form=plain,input_norm=true",
    "post:norm_at=start",
]
PAIR = {"siamese", "siamese:form=post_pre,x=post:norm_at=start,input_norm=true,final_norm=true"}
OFFICIAL = {
    LMConfig: PAIR
    | {"siamese:form=hybrid_pre", "siamese:x=hybrid", "pre", "post", "post:norm_at=start", "hybrid", "hybrid_star"},
    ViTConfig: PAIR | {"pre"},
    DiTConfig: PAIR | {"pre"},
}
SHAPE = {"dim": 16, "blocks": 2, "heads": 4, "ffn_dim": 24}
COMPLETEP = {"parametrization": "completep", "base_width": 4, "base_depth": 1}
KINDS = {
    LMConfig: (LanguageModel, {"vocab_size": 11, "max_length": 16}),
    ViTConfig: (VisionTransformer, {"image_size": 8, "patch_size": 4, "classes": 3}),
    DiTConfig: (DiT, {"input_size": 4, "patch_size": 2, "channels": 2, "classes": 3}),
}
# (attn_norm, ffn_norm, attn_residual_after_norm, ffn_residual_after_norm) of OLMo's configuration.
PLACED = {"pre": (1, 1, 0, 0), "post": (1, 1, 1, 1), "hybrid": (0, 1, 0, 1), "hybrid_star": (0, 1, 0, 1)}
STAR = "_{0: {'attn_norm': True, 'ffn_residual_after_norm': False}}_"


def olmo_config(model):
    c, single = model.config, model.residual.x if model.residual.name == "siamese" else model.residual
    norms = {kind: f"use_{kind}_norm" for kind in ("query", "key", "value")}
    hybrid = "hybrid" in single.name
    used = {"head": ("query", "key")}.get(c.qk_norm, ()) if not hybrid else norms
    names = ("attn_norm", "ffn_norm", "attn_residual_after_norm", "ffn_residual_after_norm")
    return {
        "vocab_size": c.vocab_size,
        "d_model": c.dim,
        "n_heads": c.heads,
        "n_kv_heads": c.kv_heads,
        "n_layers": c.blocks,
        "mlp_hidden_size": c.ffn_dim * (2 if c.activation == "swiglu" else 1),
        "activation_type": c.activation,
        "weight_tying": c.tied,
        "rope_theta": c.rope_theta,
        "include_bias": c.bias,
        "bias_for_layer_norm": c.norm_bias,
        "layer_norm_type": {"rms": "rms", "layer": "default"}[c.norm],
        "layer_norm_eps": c.norm_eps,
        "layer_norm_with_affine": c.norm_affine,
        "attention_layer_norm_with_affine": c.norm_affine,
        "attention_layer_norm": c.qk_norm == "projection" and not hybrid,
        "max_sequence_length": c.max_length,
        "norm_pos_special_config": STAR if single.name == "hybrid_star" else None,
        **{norms[kind]: kind in used for kind in norms},
        **dict(zip(names, map(bool, PLACED[single.name]), strict=True)),
    }


def deit_config(model):
    c = model.config
    said = {"img_size": c.image_size, "patch_size": c.patch_size, "in_chans": c.channels, "num_classes": c.classes}
    shape = {"embed_dim": c.dim, "depth": c.blocks, "num_heads": c.heads, "mlp_ratio": c.ffn_dim / c.dim}
    return {**said, **shape, "qkv_bias": c.qkv_bias, "distilled": c.distilled, "drop_path_rate": c.drop_path}


def dit_config(model):
    c = model.config
    said = {"input_size": c.input_size, "patch_size": c.patch_size, "in_channels": c.channels}
    shape = {"hidden_size": c.dim, "depth": c.blocks, "num_heads": c.heads, "mlp_ratio": c.ffn_dim / c.dim}
    return {
        **said,
        **shape,
        "num_classes": c.classes,
        "learn_sigma": c.learn_sigma,
        "class_dropout_prob": c.class_dropout,
    }


def outputs(model):
    generator = torch.Generator().manual_seed(2)
    if isinstance(model, LanguageModel):
        return model(torch.randint(11, (2, 9), generator=generator)).logits
    if isinstance(model, DiT):
        x = torch.randn(2, 2, 4, 4, generator=generator)
        return model(x, torch.tensor([3, 700]), torch.tensor([0, 2]))
    return model(torch.randn(2, model.config.channels, 8, 8, generator=generator))


def comes_back(kind, text, **changes):
    """False where it was refused; a model that comes back as another one fails here."""
    model_class, fields = KINDS[kind]
    model = model_class(kind(**{**SHAPE, **fields, "topology": text, **changes}), seed=0).eval()
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():  # far from its start, so that a lost term shows
        parameter.data += 0.3 * torch.randn(parameter.shape, generator=generator)
    try:
        state = to_official(model)
    except OfficialError as error:
        refused = str(error)
    else:
        refused = None
    if refused is not None:
        assert refused.startswith(next((f"{name} = " for name in changes), "topology: "))
        assert "\n" not in refused
        return False
    load, say = {
        LMConfig: (load_lm, olmo_config),
        ViTConfig: (load_deit, deit_config),
        DiTConfig: (load_dit, dit_config),
    }[kind]
    with torch.no_grad():
        assert torch.equal(outputs(load(state, say(model)).eval()), outputs(model))
    return True


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("kind", KINDS)
def test_every_topology_comes_back_or_is_refused(kind, text):
    assert comes_back(kind, text) == (text in OFFICIAL[kind])


FIELDS = {
    LMConfig: [
        {"kv_heads": 2},
        {"head_dim": 4},
        {"tied": True},
        {"qk_norm": "head"},
        {"qk_norm": "projection"},
        {"norm": "layer"},
        {"norm_bias": True},
        {"norm_eps": 0.1},
        {"bias": True},
        {"activation": "gelu"},
        {"rope_theta": 20.0},
        {"dropout": 0.5},
        {"z_weight": 0.1},
        {"init": "normal"},
        {"first_logits": "small"},
    ],
    ViTConfig: [
        {"channels": 1},
        {"image_size": (8, 8)},
        {"distilled": True},
        {"qkv_bias": False},
        {"classes": 0},
        {"drop_path": 0.2},
        {"dropout": 0.2},
        {"dynamic_size": True},
        {"init_std": 0.1},
    ],
    DiTConfig: [{"learn_sigma": False}, {"class_dropout": 0.0}, {"dropout": 0.2}],
}
REFUSED = {
    LMConfig: [
        {"window": 2},
        {"window": 2, "full_every": 2, "window_rope_theta": 20.0},
        {"head_dim": 6},
        {"moe": MoEConfig(experts=4, top_k=2, expert_dim=8)},
        {"qkv_bias": True},
        {"query_factor": 2.0},
        {"embedding_scale": 2.0},
        {"rope_scaling": {"kind": "linear", "factor": 2.0}},
        {"rotary_dim": 2},
        {"learned_positions": True},
        {"activation": "gelu_tanh"},
        {"activation": "geglu_tanh"},
        COMPLETEP,
    ],
    ViTConfig: [
        {"activation": "swiglu"},
        {"norm": "rms"},
        {"norm_eps": 0.1},
        {"bias": False},
        {"qk_norm": "head"},
        {"pool": "avg"},
        {"pool": "none"},
        COMPLETEP,
    ],
    DiTConfig: [{"norm": "rms"}, {"norm_eps": 0.1}, {"qk_norm": "head"}, COMPLETEP],
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_field_comes_back_or_is_refused(kind):
    texts = sorted(OFFICIAL[kind] - {"post:norm_at=start", "siamese:x=hybrid"})
    for text in texts:
        for changes in FIELDS[kind]:
            assert comes_back(kind, text, **changes), (text, changes)
    for text, changes in zip(itertools.cycle(texts), REFUSED[kind], strict=False):
        assert not comes_back(kind, text, **changes), (text, changes)
    swept = {name for changes in FIELDS[kind] + REFUSED[kind] for name in changes}
    left = {
        "topology",
        "init",
        "first_logits",
        "init_std",
        "max_length",
        "vocab_size",
        "norm_affine",
        "head_dim",
        "qk_norm",
    }
    shape = {*SHAPE, "image_size", "patch_size", "classes", "channels", "input_size", "activation"}
    assert set(kind.model_fields) - swept <= left | shape


def test_two_streams_without_gains_have_no_official_form():
    """The official loader knows the second stream by its gains."""
    for text in OFFICIAL[LMConfig]:
        assert comes_back(LMConfig, text, norm_affine=False) == (not text.startswith("siamese")), text
