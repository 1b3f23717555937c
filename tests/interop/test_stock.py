"""Models that are a stock architecture, exported as it: transformers' own class has the same logits."""

from __future__ import annotations

import pytest
import torch
import transformers as hf

from siamesenorm.errors import InteropError
from siamesenorm.interop import pretrained
from siamesenorm.interop.pretrained.stock import export_stock
from siamesenorm.models.lm import LanguageModel, LMConfig

from .pretrained_models import KINDS, saved, their_model
from .test_pretrained import CLOSE, IDS, far

SIZES = {"vocab_size": 61, "dim": 32, "blocks": 3, "heads": 4, "ffn_dim": 40, "max_length": 64}
MOE = {"experts": 4, "top_k": 2, "expert_dim": 24}
LAYER = {"norm": "layer", "norm_bias": True, "bias": True, "activation": "gelu"}
OURS = {
    "llama": {"topology": "pre", "kv_heads": 2, "bias": True},
    "mistral": {"topology": "pre", "window": 9},
    "qwen2": {"topology": "pre", "qkv_bias": True, "tied": True},
    "qwen3": {"topology": "pre", "qk_norm": "head", "window": 9, "full_every": 2},
    "olmo2": {"topology": "reordered", "norm_eps": 1e-6},
    "gemma2": {"topology": "sandwich", "tied": True},
    "gemma3_text": {"topology": "sandwich", "qk_norm": "head", "window": 9, "full_every": 3, "window_rope_theta": 77.0},
    "gpt2": {"topology": "pre", "learned_positions": True, "rotary_dim": 0, "tied": True, **LAYER},
    "gpt_neox": {"topology": "parallel", "rotary_dim": 4, **LAYER},
    "mixtral": {"topology": "pre", "moe": {**MOE, "normalize_top_k": True}},
    "olmoe": {"topology": "pre", "qk_norm": "projection", "moe": MOE},
}
"""Models of ours, by what each of them is."""


def ours(**fields) -> LanguageModel:
    """A model whose every parameter is far from its first value."""
    model = LanguageModel(LMConfig(**{**SIZES, **fields}), seed=0).eval()
    torch.manual_seed(0)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * 0.2)
    return model


@torch.no_grad()
def assert_the_same(folder, model_type, expected):
    """transformers' own class finds every weight and nothing else, and says the same."""
    made, info = hf.AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert made.config.model_type == model_type
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert far(made.eval()(IDS).logits, expected) < CLOSE


@pytest.mark.parametrize("kind", KINDS)
def test_what_was_imported_goes_back(kind, tmp_path):
    theirs = their_model(kind)
    model = pretrained.load(saved(theirs, tmp_path / "theirs"))
    export_stock(model, tmp_path / "back", theirs.config.model_type)
    with torch.no_grad():
        assert_the_same(tmp_path / "back", theirs.config.model_type, theirs(IDS).logits)


@pytest.mark.parametrize("name", OURS)
def test_what_was_made_here_is_stock(name, tmp_path):
    model = ours(**OURS[name])
    export_stock(model, tmp_path / "stock", name, max_shard_size="20KB")
    assert len(list((tmp_path / "stock").glob("*.safetensors"))) > 1
    with torch.no_grad():
        assert_the_same(tmp_path / "stock", name, model(IDS).logits)


@pytest.mark.parametrize("name", OURS)
def test_factors_of_a_parametrization_go_into_the_weights(name, tmp_path):
    """Branches and head of a model that is wider and deeper than its base are weighed; a stock model has no such."""
    model = ours(**OURS[name], parametrization="completep", base_width=16, base_depth=2)
    export_stock(model, tmp_path / "stock", name)
    with torch.no_grad():
        assert_the_same(tmp_path / "stock", name, model(IDS).logits)


@pytest.mark.parametrize(
    ("fields", "to", "sentence"),
    [
        ({"topology": "siamese"}, "llama", "topology = 'siamese' cannot be carried by llama, which has 'pre'; hf carr"),
        ({"topology": "pre", "qk_norm": "head"}, "llama", "by llama, which has 'none'; it can be qwen3"),
        ({"topology": "pre", "window": 9}, "llama", "window = 9 cannot be carried by llama, which has None"),
        ({"topology": "pre", "qk_norm": "head", "bias": True}, "qwen3", "ffn.up.bias cannot be carried by qwen3"),
        ({"topology": "pre", "window": 9}, "gemma2", "which has 'sandwich'; it can be mistral"),
        ({"topology": "pre"}, "mixtral", "moe = None cannot be carried by mixtral"),
        ({"topology": "pre"}, "gpt2", "the model cannot be carried by gpt2, which refuses it: activation_function"),
        ({"topology": "pre", "bias": True}, "gemma2", "it can be llama"),
        ({"topology": "pre", "activation": "gelu"}, "llama", "gelu_pytorch_tanh, gelu_new; hf carries every model"),
        ({"topology": "pre"}, "bert", "'bert' is not allowed; it takes one of llama"),
    ],
)  # fmt: skip
def test_what_an_architecture_cannot_carry_is_named_with_what_can(fields, to, sentence, tmp_path):
    with pytest.raises(InteropError) as refused:
        export_stock(ours(**fields), tmp_path / "stock", to)
    assert sentence in str(refused.value)
    assert not (tmp_path / "stock").exists()
