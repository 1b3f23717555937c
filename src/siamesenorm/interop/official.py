"""Language models of the official repositories: OLMo-format state dicts in and out.

::

    model = load_lm(state_dict, config_dict)          # SiameseNorm, HybridNorm, HybridNorm*, Pre-Norm, Post-Norm
    model(input_ids).logits
    to_official(model)                                # the same state dict again

Queries, keys and values as well as SwiGLU's value and gate lie fused in both, in the same order, so that every
official tensor is one of ours under another name.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from siamesenorm.interop.official_dit import dit_to_official, load_dit
from siamesenorm.interop.olmo_config import OfficialError, read_olmo_config
from siamesenorm.models.lm import LanguageModel

__all__ = ["dit_to_official", "load_dit", "load_lm", "official_names", "to_official"]

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
    names = official_names(model)
    expected = dict(model.named_parameters())
    _complain("missing", sorted(set(names.values()) - set(state)))
    _complain("unknown", sorted(set(state) - set(names.values())))
    _complain(
        "wrong shape",
        [
            f"{theirs} {tuple(state[theirs].shape)} instead of {tuple(expected[ours].shape)}"
            for ours, theirs in names.items()
            if state[theirs].shape != expected[ours].shape
        ],
    )
    model.load_state_dict({ours: state[theirs].detach().clone() for ours, theirs in names.items()}, assign=True)
    return model.requires_grad_(True)


def to_official(model: LanguageModel, *, grads: bool = False) -> dict[str, Tensor]:
    """The model's weights, or their gradients, under official names."""
    names, parameters = official_names(model), dict(model.named_parameters())
    if grads:
        return {theirs: g for ours, theirs in names.items() if (g := parameters[ours].grad) is not None}
    return {theirs: parameters[ours].detach() for ours, theirs in names.items()}


def official_names(model: LanguageModel) -> dict[str, str]:
    """Our parameter names to the official ones, one to one."""
    family = "siamese" if model.residual.name == "siamese" else "pre"
    if model.config.moe is not None or model.residual.name not in ("siamese", "pre", "post", "hybrid", "hybrid_star"):
        raise OfficialError(f"topology: {model.config.topology} has no official language model")
    modules = {"embedding": "wte", "head": "ff_out"}
    modules |= {f"residual.{ours}": theirs for theirs, ours in ENDS[family].items()}
    for block in range(model.config.blocks):
        inside = f"blocks.{block}."
        modules |= {inside + ours: inside + theirs for theirs, ours in SUBLAYERS.items()}
        for position, link in enumerate(LINKS[family]):
            place = f"residual.links.{2 * block + position}."
            modules |= {place + ours: inside + theirs for theirs, ours in link.items()}
    return {name: _rename(name, modules.get) for name, _ in model.named_parameters()}


def _rename(name: str, official: Callable[[str], str | None]) -> str:
    if (whole := official(name)) is not None:  # a parameter that is no module's: c1
        return f"transformer.{whole}"
    module, _, leaf = name.rpartition(".")
    if (theirs := official(module)) is None:
        raise OfficialError(f"{name}: no official model has this parameter")
    return f"transformer.{theirs}.{leaf}"


def _complain(what: str, names: Iterable[str]) -> None:
    listed = list(names)
    if listed:
        more = f" and {len(listed) - 10} more" if len(listed) > 10 else ""
        raise OfficialError(f"state dict: {what}: {', '.join(listed[:10])}{more}")
