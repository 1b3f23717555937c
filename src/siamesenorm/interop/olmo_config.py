"""OLMo's model configuration, with the fields that HybridNorm and SiameseNorm added, read into an `LMConfig`.

Every field is either used, known to leave a loaded model's function alone, or must have its neutral value: a
checkpoint that wants something else raises instead of loading as a slightly different model.
"""

from __future__ import annotations

import ast
from collections.abc import Mapping
from typing import Any, NamedTuple

from siamesenorm.errors import OfficialError
from siamesenorm.interop.foreign_config import as_mapping, checked, number, whole_number
from siamesenorm.models.lm import LMConfig


def words(text: str) -> frozenset[str]:
    """The set of the words in a text."""
    return frozenset(text.split())


INITS = {"mitchell": "mitchell", "full_megatron": "megatron", "normal": "normal"}
ACTIVATIONS = {"swiglu": "swiglu", "gelu": "gelu"}
NORMS = {"rms": "rms", "default": "layer", "low_precision": "layer"}

# What these say is not part of the function, or is said by the weights themselves.
WITHOUT_EFFECT = words(
    "vocab_size eos_token_id pad_token_id bos_token_id init_device init_std init_cutoff_factor emb_init_std "
    "scale_emb_init precision flash_attention rope_full_precision max_sequence_length mlp_ratio"
)
NEUTRAL: dict[str, tuple[Any, ...]] = {
    "rope": (True,),
    "alibi": (False, None),
    "block_type": ("sequential",),
    "clip_qkv": (None,),
    "scale_logits": (False, None),
    "norm_after": (False, None),
    "attention_dropout": (0, 0.0),
    "embedding_layer_norm": (False, None),
    "multi_query_attention": (False, None),
    "block_group_size": (1, None),
    "layer_norm_with_affine": (True, False),
}
USED = words(
    "d_model n_heads n_kv_heads n_layers mlp_hidden_size weight_tying rope_theta residual_dropout embedding_dropout "
    "include_bias bias_for_layer_norm layer_norm_type layer_norm_eps attention_layer_norm activation_type init_fn "
    "attention_layer_norm_with_affine embedding_size attn_norm ffn_norm attn_residual_after_norm "
    "ffn_residual_after_norm norm_pos_special_config use_query_norm use_key_norm use_value_norm"
)


class Placement(NamedTuple):
    """Where one official block has its norms, and whether the residual is taken after them."""

    attn_norm: bool
    ffn_norm: bool
    attn_after: bool
    ffn_after: bool


PRE = Placement(True, True, False, False)
POST = Placement(True, True, True, True)
HYBRID = Placement(False, True, False, True)
SPECIAL_FIELDS = {
    "attn_norm": "attn_norm",
    "ffn_norm": "ffn_norm",
    "attn_residual": "attn_after",
    "ffn_residual": "ffn_after",
    "attn_residual_after_norm": "attn_after",
    "ffn_residual_after_norm": "ffn_after",
}


def read_olmo_config(fields: Mapping[str, Any], *, two_streams: bool) -> LMConfig:
    """The `LMConfig` of a model described in OLMo's field names; `two_streams` as its weights show."""
    _refuse_unknown(as_mapping(fields))
    dim, heads = whole_number(fields, "d_model"), whole_number(fields, "n_heads")
    activation = _choose(fields, "activation_type", ACTIVATIONS, "swiglu")
    inner = whole_number(fields, "mlp_hidden_size", int(number(fields, "mlp_ratio", 4) * dim))
    qkv = tuple(bool(fields.get(f"use_{name}_norm")) for name in ("query", "key", "value"))
    topology = _topology(fields, two_streams, qkv == (True, True, True))
    dropout = fields.get("residual_dropout", 0.0)
    if fields.get("embedding_dropout", dropout) != dropout:
        raise OfficialError(
            f"embedding_dropout = {fields['embedding_dropout']} must equal residual_dropout = {dropout}"
        )
    affine = fields.get("layer_norm_with_affine", True)
    qk_norm = _qk_norm(fields, qkv, topology)
    if (qk_norm != "none" or any(qkv)) and fields.get("attention_layer_norm_with_affine", True) != affine:
        raise OfficialError(f"attention_layer_norm_with_affine must equal layer_norm_with_affine = {affine}")
    bias = bool(fields.get("include_bias", False))
    norm_bias = fields.get("bias_for_layer_norm")
    ours = {
        "vocab_size": fields.get("embedding_size") or whole_number(fields, "vocab_size"),
        "dim": dim,
        "blocks": whole_number(fields, "n_layers"),
        "heads": heads,
        "kv_heads": fields.get("n_kv_heads") or heads,
        "ffn_dim": inner // 2 if activation == "swiglu" else inner,
        "activation": activation,
        "norm": _choose(fields, "layer_norm_type", NORMS, "default"),
        "norm_eps": fields.get("layer_norm_eps", 1e-5),
        "norm_affine": affine,
        "norm_bias": bias if norm_bias is None else norm_bias,
        "bias": bias,
        "tied": fields.get("weight_tying", True),
        "topology": topology,
        "qk_norm": qk_norm,
        "rope_theta": fields.get("rope_theta", 10000),
        "max_length": fields.get("max_sequence_length", 1024),
        "dropout": dropout,
        "init": _choose(fields, "init_fn", INITS, "mitchell"),
        "init_std": fields.get("init_std", 0.02),
    }
    return checked(LMConfig, ours)


def _refuse_unknown(fields: Mapping[str, Any]) -> None:
    for name, value in fields.items():
        if name in NEUTRAL and value not in NEUTRAL[name]:
            allowed = " or ".join(repr(v) for v in NEUTRAL[name])
            raise OfficialError(f"config: {name} = {value!r} is not supported; it takes {allowed}")
        if name not in USED | WITHOUT_EFFECT | NEUTRAL.keys() and value not in (None, False):
            raise OfficialError(f"config: {name} = {value!r} is not a known field of an OLMo model")


def _choose(fields: Mapping[str, Any], name: str, known: Mapping[str, str], default: str) -> str:
    value = fields.get(name) or default
    if value not in known:
        raise OfficialError(f"config: {name} = {value!r} is not supported; it takes {', '.join(known)}")
    return known[value]


def _qk_norm(fields: Mapping[str, Any], qkv: tuple[bool, ...], topology: str) -> str:
    if fields.get("attention_layer_norm"):
        if any(qkv):
            raise OfficialError("config: attention_layer_norm and use_query_norm cannot both be true")
        return "projection"
    if qkv == (False, False, False) or qkv == (True, True, False):
        return "head" if qkv[0] else "none"
    if qkv == (True, True, True) and "hybrid" in topology:
        return "none"  # the topology brings its norms on queries, keys and values itself
    names = ", ".join(f"use_{n}_norm = {v}" for n, v in zip(("query", "key", "value"), qkv, strict=True))
    raise OfficialError(f"config: {names} is not supported with topology {topology}")


def _topology(fields: Mapping[str, Any], two_streams: bool, qkv_norm: bool) -> str:
    """The topology whose norm placement the config describes, block by block."""
    common = Placement(
        fields.get("attn_norm", True) is not False,
        fields.get("ffn_norm", True) is not False,
        bool(fields.get("attn_residual_after_norm", False)),
        bool(fields.get("ffn_residual_after_norm", False)),
    )
    placements = [common] * whole_number(fields, "n_layers")
    for block, changes in parse_special(fields.get("norm_pos_special_config")).items():
        if not 0 <= block < len(placements):
            raise OfficialError(f"config: norm_pos_special_config names block {block} of {len(placements)}")
        placements[block] = common._replace(**changes)
    rest = set(placements[1:]) or {common}
    same = set(placements) == rest
    if two_streams:
        found = {POST: "siamese", HYBRID: "siamese:form=hybrid_pre"}.get(common if same else PRE)
    elif same:
        found = {PRE: "pre", POST: "post", HYBRID: "hybrid"}.get(common)
    else:
        found = "hybrid_star" if placements[0] == PRE and rest == {HYBRID} else None
    if found is None or ("hybrid" in found and not qkv_norm):
        streams = "two streams" if two_streams else "one stream"
        raise OfficialError(
            f"config: norms at {placements[0]} in block 0 and {common} elsewhere, with {streams}, are no known topology"
        )
    return found


def parse_special(text: Any) -> dict[int, dict[str, bool]]:
    """``norm_pos_special_config`` (``"_{0:{'attn_norm':True}}_"``) as changes of `Placement` by block, without eval."""
    if text in (None, "", "__"):
        return {}
    wrong = OfficialError(
        f"config: norm_pos_special_config = {text!r} is not allowed; it takes _{{block: {{field: True or False}}}}_ "
        f"with the fields {', '.join(SPECIAL_FIELDS)}"
    )
    try:
        parsed = ast.literal_eval(text.strip("_ ")) if isinstance(text, str) else text
    except (ValueError, SyntaxError, MemoryError, RecursionError):
        raise wrong from None
    if not isinstance(parsed, dict):
        raise wrong
    found: dict[int, dict[str, bool]] = {}
    for block, changes in parsed.items():
        if not isinstance(block, int) or not isinstance(changes, dict):
            raise wrong
        if not all(name in SPECIAL_FIELDS and isinstance(value, bool) for name, value in changes.items()):
            raise wrong
        found[block] = {SPECIAL_FIELDS[name]: value for name, value in changes.items()}
    return found
