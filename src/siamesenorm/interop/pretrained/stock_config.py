"""An `LMConfig` as the configuration of a stock architecture of transformers, where the model is one.

What is written is read again by the importer: a field that comes back otherwise cannot be carried, and is named.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from siamesenorm.data.reading import reason_of
from siamesenorm.errors import InputError, InteropError
from siamesenorm.interop.foreign_folder import silenced
from siamesenorm.interop.pretrained.architectures import (
    ARCHITECTURES,
    GATED_ACTIVATIONS,
    PLAIN_ACTIVATIONS,
    Architecture,
    read_config,
)
from siamesenorm.models.lm import LMConfig

TRAINING = {"init", "init_std", "first_logits", "dropout", "z_weight"}
"""Fields that say nothing about the function."""
DERIVED = {
    "kv_heads": lambda c: c.num_kv_heads,
    "head_dim": lambda c: c.dim_per_head,
    "ffn_dim": lambda c: c.ffn_dim if c.moe is None else c.moe.expert_dim,
    "qkv_bias": lambda c: c.bias if c.qkv_bias is None else c.qkv_bias,
    "rotary_dim": lambda c: c.dim_per_head if c.rotary_dim is None else c.rotary_dim,
    "rope_theta": lambda c: None if c.rotary_dim == 0 else c.rope_theta,
    "window_rope_theta": lambda c: None if c.window_rotary == c.rotary else c.window_rope_theta,
    "full_every": lambda c: None if c.full_every is None or c.full_every > c.blocks else c.full_every,
    "qk_norm": lambda c: "none" if c.topology == "reordered" else c.qk_norm,
    "moe": lambda c: None if c.moe is None else (c.moe.experts, c.moe.top_k, c.moe.normalize_top_k),
}
"""What a field comes to, where several of its values mean the same."""


def stock_config(config: LMConfig, model_type: str) -> Any:
    """Their configuration of our model; raises where the architecture cannot carry it."""
    made, lost = attempt(config, model_type)
    if lost is not None:
        raise InteropError(f"--to: {lost[0]} cannot be carried by {model_type}, which {lost[1]}")
    return made


def attempt(config: LMConfig, model_type: str) -> tuple[Any, tuple[str, str] | None]:
    """Their configuration, and what of ours it cannot carry: the first field with its value, and what they have."""
    from transformers import CONFIG_MAPPING

    kind, kind_class = ARCHITECTURES[model_type], CONFIG_MAPPING[model_type]
    names = kind_class.attribute_map
    try:
        with silenced():
            fields = their_fields(config, kind, kind_class())
            made = kind_class(**{names.get(name, name): value for name, value in fields})
            again = read_config(made, kind)
    except Exception as error:  # their checks raise in kinds of their own
        reason = error.sentence if isinstance(error, InputError) else reason_of(error)
        return None, ("the model", f"refuses it: {reason.removeprefix('source: ')}")
    lost = next(differences(config, again), None)
    return made, None if lost is None else (f"{lost[0]} = {lost[1]!r}", f"has {lost[2]!r}")


def differences(ours: LMConfig, theirs: LMConfig) -> Iterator[tuple[str, Any, Any]]:
    """Fields in which two configurations compute differently."""
    for name in ("topology", "moe", *LMConfig.model_fields):  # what kind of model it is comes first
        if name in TRAINING:
            continue
        one, other = (DERIVED[name](c) if name in DERIVED else getattr(c, name) for c in (ours, theirs))
        if one != other and not (isinstance(one, float) and isinstance(other, float) and math.isclose(one, other)):
            yield name, one, other


def their_fields(c: LMConfig, kind: Architecture, default: Any) -> Iterator[tuple[str, Any]]:
    """Names and values in their words; a name that their configuration has not says nothing."""
    wanted: dict[str, Any] = {
        "vocab_size": c.vocab_size,
        "hidden_size": c.dim,
        "num_hidden_layers": c.blocks,
        "num_attention_heads": c.heads,
        "num_key_value_heads": c.num_kv_heads,
        "intermediate_size": c.ffn_dim if c.moe is None else c.moe.expert_dim,
        "n_inner": c.ffn_dim,
        "max_position_embeddings": c.max_length,
        "tie_word_embeddings": c.tied,
        "initializer_range": c.init_std,
        "attention_dropout": 0.0,
        "attention_bias": DERIVED["qkv_bias"](c) and not kind.qkv_bias,
        "mlp_bias": c.bias,
        "query_pre_attn_scalar": round(c.dim_per_head / c.query_factor**2),
        "use_parallel_residual": c.topology == "parallel",
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        **dict.fromkeys(("rms_norm_eps", "layer_norm_eps", "layer_norm_epsilon"), c.norm_eps),
        **dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0),
        **dict.fromkeys(("bos_token_id", "eos_token_id", "pad_token_id")),
    }
    known = {**PLAIN_ACTIVATIONS, **{theirs: ours for theirs, ours in GATED_ACTIVATIONS.items() if theirs != "swish"}}
    for theirs, ours in reversed(known.items()):
        if ours == c.activation:
            wanted |= dict.fromkeys(("hidden_act", "hidden_activation", "activation_function"), theirs)
    if c.moe is not None:
        wanted |= {
            "num_experts": c.moe.experts,
            "num_experts_per_tok": c.moe.top_k,
            "moe_intermediate_size": c.moe.expert_dim,
            "norm_topk_prob": c.moe.normalize_top_k,
            "router_aux_loss_coef": c.moe.balance_weight,
        }
    if kind.names == "llama":
        yield "head_dim", c.dim_per_head
    if kind.names != "gpt2":
        yield "rope_parameters", their_angles(c, default.rope_parameters)
    yield from (pair for pair in wanted.items() if hasattr(default, pair[0]))
    yield from their_windows(c, default)


def their_windows(c: LMConfig, default: Any) -> Iterator[tuple[str, Any]]:
    """The window, and which blocks have it."""
    if hasattr(default, "layer_types"):
        names = {True: "sliding_attention", False: "full_attention"}
        yield "layer_types", [names[c.is_windowed(block)] for block in range(c.blocks)]
    if hasattr(default, "use_sliding_window"):
        yield "use_sliding_window", c.window is not None
    if hasattr(default, "sliding_window") and (c.window is not None or not hasattr(default, "layer_types")):
        yield "sliding_window", c.window


def their_angles(c: LMConfig, default: Any) -> dict[str, Any]:
    """Rotary angles; of all blocks, or of those with a window apart, as their configuration has it."""
    parameters: dict[str, Any] = {"rope_type": "default", "rope_theta": c.rope_theta}
    if c.rotary_dim is not None or "partial_rotary_factor" in default:
        parameters["partial_rotary_factor"] = DERIVED["rotary_dim"](c) / c.dim_per_head
    s = c.rope_scaling
    if s is not None:
        parameters |= {"rope_type": s.kind, "factor": s.factor}
    if s is not None and s.kind != "linear":
        parameters["original_max_position_embeddings"] = s.original_length
        low, high = ("beta_slow", "beta_fast") if s.kind == "yarn" else ("low_freq_factor", "high_freq_factor")
        parameters |= {low: s.low, high: s.high}
    if s is not None and s.kind == "yarn":
        parameters |= {"attention_factor": s.attention_factor, "truncate": s.whole_pairs}
    if "rope_theta" in default:
        return parameters
    local = parameters if c.window_rope_theta is None else {"rope_type": "default", "rope_theta": c.window_rope_theta}
    return {"full_attention": parameters, "sliding_attention": local}
