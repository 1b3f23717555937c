"""Configurations of transformers' language models, read into an `LMConfig`: each into the topology that it is.

A field that changes a model's function is used, or must have its neutral value: what cannot be carried is refused by
name. What a kind of model does not read in transformers (a Llama's sliding_window) is not read here. Dropout is not
carried; it is a matter of training.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from siamesenorm.errors import InteropError
from siamesenorm.interop.foreign_config import checked
from siamesenorm.layers.rope_scaling import yarn_size
from siamesenorm.models.lm import LMConfig

GATED_ACTIVATIONS = {
    "silu": "swiglu",
    "swish": "swiglu",
    "gelu_pytorch_tanh": "geglu_tanh",
    "gelu_new": "geglu_tanh",
}
PLAIN_ACTIVATIONS = {"gelu": "gelu", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh"}

NEUTRAL: dict[str, tuple[Any, ...]] = {
    "clip_qkv": (None,),
    "attn_logit_softcapping": (None,),
    "final_logit_softcapping": (None,),
    "use_bidirectional_attention": (None, False),
    "quantization_config": (None,),
    "add_cross_attention": (None, False),
    "scale_attn_weights": (None, True),
    "scale_attn_by_inverse_layer_idx": (None, False),
    "mlp_only_layers": (None, []),
    "decoder_sparse_step": (None, 1),
    "shared_expert_intermediate_size": (None,),
}
"""Fields that may not have any other value; where a kind of model has none of them, they are None."""


@dataclass(frozen=True)
class Architecture:
    """What a kind of model has that its configuration does not say."""

    names: str
    """How its tensors are named; see names.py."""
    topology: str = "pre"
    qk_norm: str = "none"
    qkv_bias: bool = False
    """Whether queries, keys and values alone have a bias, always."""
    plus_one: bool = False
    """Whether gains are stored less one (Gemma)."""
    norm: str = "rms"
    norm_affine: bool = True
    normalize_top_k: bool | None = None
    """Of experts; None: as norm_topk_prob says."""
    experts: str = "mlp"
    """The name of the module that holds experts."""


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("llama"),
    "mistral": Architecture("llama"),
    "qwen2": Architecture("llama", qkv_bias=True),
    "qwen3": Architecture("llama", qk_norm="head"),
    "olmo": Architecture("llama", norm="layer", norm_affine=False),
    "olmo2": Architecture("llama", topology="reordered", qk_norm="projection"),
    "olmo3": Architecture("llama", topology="reordered", qk_norm="projection"),
    "gemma": Architecture("llama", plus_one=True),
    "gemma2": Architecture("llama", topology="sandwich", plus_one=True),
    "gemma3_text": Architecture("llama", topology="sandwich", qk_norm="head", plus_one=True),
    "mixtral": Architecture("llama", normalize_top_k=True, experts="block_sparse_moe"),
    "olmoe": Architecture("llama", qk_norm="projection"),
    "qwen3_moe": Architecture("llama", qk_norm="head"),
    "gpt2": Architecture("gpt2", norm="layer"),
    "gpt_neox": Architecture("neox", norm="layer"),
}
"""Kinds of models by transformers' ``model_type``."""


def architecture_of(model_type: Any) -> Architecture:
    """The kind of a folder's model."""
    if not isinstance(model_type, str) or model_type not in ARCHITECTURES:
        raise InteropError(
            f"source: model_type {model_type!r} cannot be imported; it takes one of {', '.join(ARCHITECTURES)}"
        )
    return ARCHITECTURES[model_type]


def read_config(theirs: Any, kind: Architecture) -> LMConfig:
    """The `LMConfig` of a configuration of transformers."""
    for name, neutral in NEUTRAL.items():
        if (value := getattr(theirs, name, None)) not in neutral:
            raise InteropError(f"source: {name} = {value!r} in config.json cannot be carried; it takes {neutral[-1]!r}")
    heads, dim = theirs.num_attention_heads, theirs.hidden_size
    head_dim = getattr(theirs, "head_dim", None) or dim // heads
    fields: dict[str, Any] = {
        "vocab_size": theirs.vocab_size,
        "dim": dim,
        "blocks": theirs.num_hidden_layers,
        "heads": heads,
        "head_dim": None if head_dim * heads == dim else head_dim,
        "max_length": theirs.max_position_embeddings,
        "tied": bool(theirs.tie_word_embeddings),
        "topology": "parallel" if getattr(theirs, "use_parallel_residual", False) else kind.topology,
        "qk_norm": "none" if kind.topology == "reordered" else kind.qk_norm,
        "norm": kind.norm,
        "norm_affine": kind.norm_affine,
        "init": "normal",
        "init_std": theirs.initializer_range,
    }
    if kind.names == "gpt2":
        fields |= {
            "ffn_dim": theirs.n_inner or 4 * dim,
            "activation": chosen(theirs, "activation_function", PLAIN_ACTIVATIONS),
            "norm_eps": theirs.layer_norm_epsilon,
            "norm_bias": True,
            "bias": True,
            "learned_positions": True,
            "rotary_dim": 0,
        }
        return checked(LMConfig, fields)
    fields |= rotary_fields(theirs, head_dim, partly=kind.names == "neox")
    fields["ffn_dim"] = theirs.intermediate_size
    if kind.names == "neox":
        fields |= {
            "activation": chosen(theirs, "hidden_act", PLAIN_ACTIVATIONS),
            "norm_eps": theirs.layer_norm_eps,
            "norm_bias": True,
            "bias": True,
        }
        return checked(LMConfig, fields)
    attention_bias = bool(getattr(theirs, "attention_bias", False)) and not kind.qkv_bias
    bias = attention_bias or bool(getattr(theirs, "mlp_bias", False))  # what is biased in part is so as a whole
    qkv_bias = kind.qkv_bias or attention_bias
    gated = "hidden_act" if hasattr(theirs, "hidden_act") else "hidden_activation"
    fields |= {
        "kv_heads": None if theirs.num_key_value_heads in (None, heads) else theirs.num_key_value_heads,
        "activation": chosen(theirs, gated, GATED_ACTIVATIONS),
        "norm_eps": getattr(theirs, "rms_norm_eps", 1e-5),
        "bias": bias,
        "qkv_bias": None if qkv_bias == bias else qkv_bias,
        "query_factor": math.sqrt(head_dim / (getattr(theirs, "query_pre_attn_scalar", None) or head_dim)),
        "embedding_scale": math.sqrt(dim) if kind.plus_one else 1.0,
        "moe": expert_fields(theirs, kind),
    }
    if fields["moe"] is not None:
        fields["ffn_dim"] = fields["moe"]["expert_dim"]
    return checked(LMConfig, fields)


def chosen(theirs: Any, name: str, known: Mapping[str, str]) -> str:
    """Our word for theirs."""
    value = getattr(theirs, name)
    if value not in known:
        raise InteropError(f"source: {name} = {value!r} in config.json cannot be carried; it takes {', '.join(known)}")
    return known[value]


def expert_fields(theirs: Any, kind: Architecture) -> dict[str, Any] | None:
    """A mixture of experts, where the model has one."""
    experts = getattr(theirs, "num_local_experts", None) or getattr(theirs, "num_experts", None)
    if experts is None:
        return None
    normalize = kind.normalize_top_k
    return {
        "experts": experts,
        "top_k": theirs.num_experts_per_tok,
        "expert_dim": getattr(theirs, "moe_intermediate_size", None) or theirs.intermediate_size,
        "balance_weight": theirs.router_aux_loss_coef,
        "z_weight": 0.0,
        "normalize_top_k": bool(theirs.norm_topk_prob) if normalize is None else normalize,
    }


# Positions ------------------------------------------------------------------------------------------------


def rotary_fields(theirs: Any, head_dim: int, *, partly: bool) -> dict[str, Any]:
    """Rotary angles, and which blocks have a window; partly: whether heads of such a model may rotate in part."""
    rope: Mapping[str, Any] = theirs.rope_parameters
    common, local = rope, rope
    if "rope_theta" not in rope:
        common, local = rope["full_attention"], rope["sliding_attention"]
    fields = {"rope_theta": common["rope_theta"], "rope_scaling": scaling_of(common, theirs.max_position_embeddings)}
    share = common.get("partial_rotary_factor", 1.0)
    if partly and share != 1:
        fields["rotary_dim"] = int(head_dim * share)
    fields |= window_fields(theirs)
    if local != common and fields.get("window") is not None:
        if local.get("rope_type", "default") != "default":
            raise InteropError(
                f"source: rope_type {local['rope_type']!r} of sliding attention in config.json cannot be carried; "
                f"it takes 'default'"
            )
        fields["window_rope_theta"] = local["rope_theta"]
    return fields


def window_fields(theirs: Any) -> dict[str, Any]:
    """The window, and every how many blocks one has none."""
    if not hasattr(type(theirs), "sliding_window"):
        return {"window": None}
    window, layers = getattr(theirs, "sliding_window", None), getattr(theirs, "layer_types", None)
    if window is None or layers is None:
        return {"window": window}
    full = [kind == "full_attention" for kind in layers]
    if not any(full):
        return {"window": window}
    every = full.index(True) + 1
    if every == 1 and all(full):
        return {"window": None}
    if full != [(block + 1) % every == 0 for block in range(len(full))]:
        raise InteropError(
            f"source: layer_types = {layers} in config.json cannot be carried; "
            f"it takes full attention in the last of every n blocks, or in none"
        )
    return {"window": window, "full_every": every}


def scaling_of(rope: Mapping[str, Any], max_length: int) -> dict[str, Any] | None:
    """Scaled angles; dynamic ones begin to differ behind the longest sequence, where nothing is computed."""
    kind = rope.get("rope_type", "default")
    if kind in ("default", "dynamic"):
        return None
    if kind not in SCALINGS:
        known = ", ".join(["default", "dynamic", *SCALINGS])
        raise InteropError(f"source: rope_type {kind!r} in config.json cannot be carried; it takes one of {known}")
    return {"kind": kind, **SCALINGS[kind](rope, max_length)}


def _linear(rope: Mapping[str, Any], max_length: int) -> dict[str, Any]:
    return {"factor": rope["factor"]}


def _llama3(rope: Mapping[str, Any], max_length: int) -> dict[str, Any]:
    return {
        "factor": rope["factor"],
        "original_length": rope["original_max_position_embeddings"],
        "low": rope["low_freq_factor"],
        "high": rope["high_freq_factor"],
    }


def _yarn(rope: Mapping[str, Any], max_length: int) -> dict[str, Any]:
    original = rope["original_max_position_embeddings"]
    factor = rope.get("factor") or max_length / original
    scale, whole = rope.get("mscale"), rope.get("mscale_all_dim")
    size = yarn_size(factor, scale) / yarn_size(factor, whole) if scale and whole else yarn_size(factor)
    given = rope.get("attention_factor")
    return {
        "factor": factor,
        "original_length": original,
        "low": rope.get("beta_slow") or 1.0,
        "high": rope.get("beta_fast") or 32.0,
        "attention_factor": size if given is None else given,
        "whole_pairs": rope.get("truncate", True),
    }


SCALINGS: dict[str, Callable[[Mapping[str, Any], int], dict[str, Any]]] = {
    "linear": _linear,
    "llama3": _llama3,
    "yarn": _yarn,
}
