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

from siamesenorm.errors import OfficialError
from siamesenorm.interop.foreign_config import as_mapping, checked, number, whole_number
from siamesenorm.interop.official_forms import DIFFUSION, official_topology
from siamesenorm.interop.renaming import Names, load_renamed, rename
from siamesenorm.models.dit import DiT, DiTConfig

FIELDS: dict[str, Any] = {
    "input_size": 32,
    "patch_size": 2,
    "in_channels": 4,
    "hidden_size": 1152,
    "depth": 28,
    "num_heads": 16,
    "mlp_ratio": 4.0,
    "class_dropout_prob": 0.1,
    "num_classes": 1000,
    "learn_sigma": True,
}
"""Keyword arguments of the official class with their defaults."""
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


def read_dit_config(config: Mapping[str, Any], topology: str) -> DiTConfig:
    """A `DiTConfig` from the official class's keyword arguments; those left out have its defaults."""
    unknown = sorted(set(as_mapping(config)) - set(FIELDS))
    if unknown:
        raise OfficialError(f"config: unknown fields {', '.join(unknown)}; known fields: {', '.join(FIELDS)}")
    given = {**FIELDS, **config}
    dim = whole_number(given, "hidden_size")
    ours = {
        "input_size": given["input_size"],
        "patch_size": given["patch_size"],
        "channels": given["in_channels"],
        "classes": given["num_classes"],
        "dim": dim,
        "blocks": given["depth"],
        "heads": given["num_heads"],
        "ffn_dim": int(dim * number(given, "mlp_ratio", 4.0)),
        "class_dropout": given["class_dropout_prob"],
        "learn_sigma": given["learn_sigma"],
        "topology": topology,
    }
    return checked(DiTConfig, ours)


def load_dit(state_dict: Mapping[str, Tensor], config_dict: Mapping[str, Any]) -> DiT:
    """The model of an official state dict and the keyword arguments that its class was made with.

    The topology is recognised from the second stream's norms. Wrong, missing or extra keys and wrong shapes raise
    `OfficialError` with their names.
    """
    topology = "siamese" if any(key.startswith("postnorm.") for key in state_dict) else "pre"
    with torch.device("meta"):
        model = DiT(read_dit_config(config_dict, topology))
    return load_renamed(model, dit_names(model), state_dict)


def dit_names(model: DiT) -> Names:
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
