"""Diffusion Transformers of the official repositories: facebookresearch/DiT's state dicts, and SiameseNorm's.

::

    model = load_dit(state_dict, config_dict)         # Pre-Norm, or siamese where the second stream's norms are there
    model(x, t, y)                                    # label num_classes is the unconditional one
    to_official(model)                                # the same state dict again

Every official tensor is one of ours under another name.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from siamesenorm.interop.foreign_config import read_keywords
from siamesenorm.interop.official_forms import DIFFUSION, official_topology
from siamesenorm.interop.renaming import Renaming, load_renamed, rename
from siamesenorm.models.dit import DiT, DiTConfig

KEYWORDS = {
    "input_size": "input_size",
    "patch_size": "patch_size",
    "in_channels": "channels",
    "hidden_size": "dim",
    "depth": "blocks",
    "num_heads": "heads",
    "class_dropout_prob": "class_dropout",
    "num_classes": "classes",
    "learn_sigma": "learn_sigma",
}
"""The official constructor's keywords to fields of ours."""
DEFAULTS = {
    "input_size": 32,
    "patch_size": 2,
    "channels": 4,
    "classes": 1000,
    "dim": 1152,
    "blocks": 28,
    "heads": 16,
    "class_dropout": 0.1,
    "learn_sigma": True,
}
MODULES = {
    "positions": "pos_embed",
    "embedding": "x_embedder.proj",
    "timestep.up": "t_embedder.mlp.0",
    "timestep.down": "t_embedder.mlp.2",
    "label.table": "y_embedder.embedding_table",
    "head": "final_layer.linear",
    "head_modulation.linear": "final_layer.adaLN_modulation.1",
    "residual.x.final_norm": "postnorm",
    "residual.y.final_norm": "prenorm",
}
BLOCK = {
    "attention.qkv": "attn.qkv",
    "attention.out": "attn.proj",
    "ffn.up": "mlp.fc1",
    "ffn.down": "mlp.fc2",
    "modulation.linear": "adaLN_modulation.1",
}


def load_dit(state_dict: Mapping[str, Tensor], config_dict: Mapping[str, Any]) -> DiT:
    """The model of an official state dict and the keyword arguments that its class was made with.

    The topology is recognised from the second stream's norms. Wrong, missing or extra keys and wrong shapes raise
    `OfficialError` with their names.
    """
    topology = "siamese" if any(key.startswith("postnorm.") for key in state_dict) else "pre"
    with torch.device("meta"):
        model = DiT(read_keywords(DiTConfig, config_dict, KEYWORDS, DEFAULTS, topology))
    return load_renamed(model, dit_names(model), state_dict)


def dit_names(model: DiT) -> Renaming:
    """Our names to the official ones."""
    official_topology(model.residual, DIFFUSION, "diffusion Transformer")
    modules = dict(MODULES)
    for block in range(model.config.blocks):
        modules |= {f"blocks.{block}.{ours}": f"blocks.{block}.{theirs}" for ours, theirs in BLOCK.items()}
        for position in (1, 2):
            link = f"blocks.{block}.links.{position - 1}"
            modules |= {
                f"{link}.x.norm": f"blocks.{block}.postnorm{position}",
                f"{link}.y.norm": f"blocks.{block}.prenorm{position}",
            }
    return {name: rename(name, modules) for name in model.state_dict()}
