"""Weights between timm and us: plain DeiT and ViT weights are those of our Pre-Norm model under other names."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from siamesenorm.errors import OfficialError
from siamesenorm.interop.official_deit import deit_names, load_deit
from siamesenorm.interop.renaming import check_keys
from siamesenorm.layers.patch import resample_positions, square_grid
from siamesenorm.models.vit import VisionTransformer

HEADS = ("head.", "head_dist.")


def checkpoint_filter_fn(state_dict: Mapping[str, Any], model: VisionTransformer) -> dict[str, Tensor]:
    """A checkpoint's tensors under the names and with the positions of `model`, for timm's loading functions.

    It takes our own names, timm's (for Pre-Norm) and the official ones (for SiameseNorm), and positions of another
    square image; heads apart, a checkpoint that lacks tensors or has others is refused, also where timm would take
    what fits. ``timm.models.load_checkpoint(model, path, filter_fn=checkpoint_filter_fn)``, and
    ``create_model(..., pretrained=True, pretrained_cfg_overlay={"file": path})`` does so by itself.
    """
    for wrapper in ("model", "state_dict"):
        if isinstance(inner := state_dict.get(wrapper), Mapping):
            state_dict = inner
    state = dict(state_dict)
    if any(".attn.qkv." in key for key in state):
        ours = {theirs: name for name, theirs in deit_names(model).items()}
        state = {ours.get(key, key): value for key, value in state.items()}
    check_keys(*({key for key in keys if not key.startswith(HEADS)} for keys in (model.state_dict(), state)))
    positions = state.get("pos_embed")
    if positions is not None and positions.shape[1] != model.config.tokens:
        prefix = model.config.prefix_tokens
        old = square_grid(positions.shape[1], prefix)
        state["pos_embed"] = resample_positions(positions, old, model.config.grid, prefix)
    return state


def load_timm(model: nn.Module) -> VisionTransformer:
    """Our Pre-Norm model with the weights and the function of a plain DeiT or ViT of timm's.

    ::

        load_timm(timm.create_model("deit_tiny_patch16_224", pretrained=True))

    Variants with more (layer scale, registers, other positions or pooling) raise `OfficialError`.
    """
    theirs: Any = model
    try:
        first = theirs.blocks[0]
        config = {
            "img_size": tuple(theirs.patch_embed.img_size),
            "patch_size": theirs.patch_embed.patch_size[0],
            "in_chans": theirs.patch_embed.proj.in_channels,
            "num_classes": theirs.num_classes,
            "embed_dim": theirs.embed_dim,
            "depth": len(theirs.blocks),
            "num_heads": first.attn.num_heads,
            "mlp_ratio": first.mlp.fc1.out_features / theirs.embed_dim,
            "qkv_bias": first.attn.qkv.bias is not None,
            "distilled": getattr(theirs, "dist_token", None) is not None,
        }
        _check_plain(theirs, first)
    except (AttributeError, IndexError, TypeError) as error:
        raise OfficialError(f"{type(model).__name__}: not a vision Transformer as timm builds DeiT ({error})") from None
    loaded = load_deit(model.state_dict(), config)
    return loaded.train(model.training)


def _check_plain(model: Any, block: Any) -> None:
    """Raise where the function is another, though names might fit."""
    plain = {
        "global_pool": model.global_pool == "token",
        "no_embed_class": not model.no_embed_class,
        "norm_layer": isinstance(block.norm1, nn.LayerNorm) and block.norm1.eps == 1e-6,
        "act_layer": isinstance(block.mlp.act, nn.GELU) and block.mlp.act.approximate == "none",
        "qk_norm": isinstance(block.attn.q_norm, nn.Identity),
        "patch_size": torch.Size(model.patch_embed.patch_size).count(model.patch_embed.patch_size[0]) == 2,
    }
    for name, fits in plain.items():
        if not fits:
            raise OfficialError(f"{type(model).__name__}: {name} is not that of a plain DeiT or ViT")
