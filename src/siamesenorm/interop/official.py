"""Models of the official repositories: their state dicts in and out.

::

    model = load_lm(state_dict, config_dict)          # SiameseNorm, HybridNorm, HybridNorm*, Pre-Norm, Post-Norm
    model(input_ids).logits
    load_deit(state_dict, config_dict)(image)         # vision: interop/official_deit.py
    load_dit(state_dict, config_dict)(x, t, y)        # diffusion: interop/official_dit.py
    to_official(model)                                # the same state dict again

Language models come in OLMo's format. Queries, keys and values as well as SwiGLU's value and gate lie fused in
both, in the same order, so that every official tensor is one of ours under another name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from siamesenorm.errors import OfficialError
from siamesenorm.interop.official_deit import deit_names, load_deit
from siamesenorm.interop.official_dit import dit_names, load_dit
from siamesenorm.interop.official_forms import (
    DIFFUSION_FIELDS,
    LANGUAGE,
    VISION_FIELDS,
    check_fields,
    check_language_fields,
    official_topology,
)
from siamesenorm.interop.olmo_config import read_olmo_config
from siamesenorm.interop.renaming import Renaming, give_renamed, load_renamed, rename
from siamesenorm.models.dit import DiT
from siamesenorm.models.lm import LanguageModel
from siamesenorm.models.vit import VisionTransformer

__all__ = ["OfficialError", "load_deit", "load_dit", "load_lm", "official_names", "to_official"]

SUBLAYERS = {
    "att_proj": "attention.qkv",
    "attn_out": "attention.out",
    "q_norm": "attention.q_norm",
    "k_norm": "attention.k_norm",
    "v_norm": "attention.v_norm",
    "ff_proj": "ffn.up",
    "ff_out": "ffn.down",
}
# Official module to ours within the link of a block's attention and of its FFN, by topology.
LINKS = {
    "pre": ({"attn_norm": "norm"}, {"ff_norm": "norm"}),
    "siamese": (
        {"attn_norm": "x.norm", "attn_y_norm": "y.norm", "attn_input_norm": "input_norm", "c1": "gain"},
        {"ff_norm": "x.norm", "ff_y_norm": "y.norm", "ff_input_norm": "input_norm"},
    ),
}
ENDS = {
    "pre": {"ln_f": "final_norm"},
    "siamese": {"ln_f": "x.final_norm", "ln_y_f": "y.final_norm", "ln_final_f": "final_norm"},
}


def load_lm(state_dict: Mapping[str, Tensor], config_dict: Mapping[str, Any]) -> LanguageModel:
    """The model of an OLMo-format state dict and its config in OLMo's field names.

    The topology is recognised from the config's norm fields and from the second stream's weights. Wrong, missing
    or extra keys and wrong shapes raise `OfficialError` with their names.
    """
    state = {key.removeprefix("model."): value for key, value in state_dict.items()}
    two_streams = any(".attn_y_norm." in key or key.startswith("transformer.ln_y_f.") for key in state)
    config = read_olmo_config(config_dict, two_streams=two_streams)
    with torch.device("meta"):
        model = LanguageModel(config)
    return load_renamed(model, official_names(model), state)


def to_official(model: LanguageModel | VisionTransformer | DiT, *, grads: bool = False) -> dict[str, Tensor]:
    """The model's weights, or their gradients, under official names.

    Raises `OfficialError` where the official code has no such model: its loader would make another one of them.
    """
    return give_renamed(model, official_names(model), grads=grads)


def official_names(model: LanguageModel | VisionTransformer | DiT) -> Renaming:
    """Our parameter names to the official ones, one to one; a model without an official form raises."""
    if isinstance(model, DiT):
        check_fields(model.config, DIFFUSION_FIELDS, "diffusion Transformer")
        return dit_names(model)
    if isinstance(model, VisionTransformer):
        check_fields(model.config, VISION_FIELDS, "vision model")
        return deit_names(model)
    return olmo_names(model)


def olmo_names(model: LanguageModel) -> Renaming:
    """Names in OLMo's format."""
    topology = official_topology(model.residual, LANGUAGE, "language model")
    check_language_fields(model.config, topology)
    family = "siamese" if model.residual.name == "siamese" else "pre"
    modules = {"embedding": "wte", "head": "ff_out"}
    modules |= {f"residual.{ours}": theirs for theirs, ours in ENDS[family].items()}
    for block in range(model.config.blocks):
        inside = f"blocks.{block}."
        modules |= {inside + ours: inside + theirs for theirs, ours in SUBLAYERS.items()}
        for position, link in enumerate(LINKS[family]):
            place = f"blocks.{block}.links.{position}."
            modules |= {place + ours: inside + theirs for theirs, ours in link.items()}
    return {name: "transformer." + rename(name, modules) for name, _ in model.named_parameters()}
