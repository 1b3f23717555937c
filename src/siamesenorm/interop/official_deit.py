"""Vision models of the official repositories: DeiT on SiameseNorm, and the plain DeiT and ViT that timm names.

::

    model = load_deit(state_dict, {"img_size": 224, "embed_dim": 192, "num_heads": 3})
    model(image)                       # logits; in training with a distillation token the pair of both heads'

Both lay out their tensors as we do, so that every one of theirs is one of ours under another name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from siamesenorm.interop.foreign_config import read_keywords
from siamesenorm.interop.official_forms import VISION, official_topology
from siamesenorm.interop.renaming import Renaming, load_renamed, rename
from siamesenorm.models.vit import VisionTransformer, ViTConfig

SUBLAYERS = {
    "attn.qkv": "attention.qkv",
    "attn.proj": "attention.out",
    "attn.q_norm": "attention.q_norm",
    "attn.k_norm": "attention.k_norm",
    "mlp.fc1": "ffn.up",
    "mlp.fc2": "ffn.down",
}
# Official module to ours within the links of a block, {} being 1 for attention and 2 for the FFN, by topology.
LINKS = {
    "pre": {"norm{}": "norm"},
    "siamese": {"post_norm{}": "x.norm", "pre_norm{}": "y.norm", "input_norm{}": "input_norm"},
}
# At the end the official names change sides: pre_norm stands on the Post-Norm-like X, post_norm on Y.
ENDS = {
    "pre": {"norm": "final_norm"},
    "siamese": {"pre_norm": "x.final_norm", "post_norm": "y.final_norm", "final_norm": "final_norm"},
}
OUTSIDE = ("cls_token", "dist_token", "pos_embed", "patch_embed.proj", "head", "head_dist")
# The official constructor's keywords to fields of ours.
KEYWORDS = {
    "img_size": "image_size",
    "patch_size": "patch_size",
    "in_chans": "channels",
    "num_classes": "classes",
    "embed_dim": "dim",
    "depth": "blocks",
    "num_heads": "heads",
    "qkv_bias": "qkv_bias",
    "distilled": "distilled",
    "drop_path_rate": "drop_path",
}
DEFAULTS = {"image_size": 224, "patch_size": 16, "classes": 1000, "dim": 768, "blocks": 12, "heads": 12}


def load_deit(state_dict: Mapping[str, Tensor], config_dict: Mapping[str, Any]) -> VisionTransformer:
    """The model of an official or timm state dict and the keywords of its constructor.

    SiameseNorm is recognised by its second stream's norms; all else is Pre-Norm. Wrong, missing or extra keys and
    wrong shapes raise `OfficialError` with their names.
    """
    topology = "siamese" if any(key.startswith("blocks.0.post_norm") for key in state_dict) else "pre"
    with torch.device("meta"):
        model = VisionTransformer(read_keywords(ViTConfig, config_dict, KEYWORDS, DEFAULTS, topology))
    return load_renamed(model, deit_names(model), state_dict)


def deit_names(model: VisionTransformer) -> Renaming:
    """Our parameter names to the official ones."""
    topology = official_topology(model.residual, VISION, "vision model")
    modules = {name: name for name in OUTSIDE}
    modules |= {f"residual.{ours}": theirs for theirs, ours in ENDS[topology].items()}
    for block in range(model.config.blocks):
        inside = f"blocks.{block}."
        modules |= {inside + ours: inside + theirs for theirs, ours in SUBLAYERS.items()}
        for position in (0, 1):
            place = f"blocks.{block}.links.{position}."
            modules |= {place + ours: inside + theirs.format(position + 1) for theirs, ours in LINKS[topology].items()}
    return {name: rename(name, modules) for name, _ in model.named_parameters()}
