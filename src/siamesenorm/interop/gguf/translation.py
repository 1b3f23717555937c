"""GGUF's words for what Hugging Face folders say: names of tensors and fields, one table read both ways."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn

import numpy as np
import torch
from torch import Tensor

from siamesenorm.errors import InteropError
from siamesenorm.interop.gguf.reader import GgufFile
from siamesenorm.layers.rope_scaling import Scaling, yarn_size

ARCHITECTURES = {"llama": "llama", "qwen2": "qwen2", "qwen3": "qwen3", "olmo2": "olmo2"}
"""GGUF's names of architectures to transformers'."""
FIELDS = {
    "vocab_size": "vocab_size",
    "context_length": "max_position_embeddings",
    "embedding_length": "hidden_size",
    "block_count": "num_hidden_layers",
    "feed_forward_length": "intermediate_size",
    "attention.head_count": "num_attention_heads",
    "attention.head_count_kv": "num_key_value_heads",
    "attention.key_length": "head_dim",
    "attention.value_length": "head_dim",
    "rope.dimension_count": "head_dim",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
    "rope.freq_base": "rope_theta",
}
ROPE = {
    "rope.scaling.type": "rope_type",
    "rope.scaling.factor": "factor",
    "rope.scaling.original_context_length": "original_max_position_embeddings",
}
SILENT = {"rope.scaling.finetuned", "attention.causal"}
"""Fields that change nothing."""
SPECIAL = {f"{name}_token_id": f"tokenizer.ggml.{name}_token_id" for name in ("bos", "eos")}
SPECIAL["pad_token_id"] = "tokenizer.ggml.padding_token_id"
OUTER = {"model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output"}
INNER = {f"self_attn.{part}_proj": f"attn_{part}" for part in "qkv"}
INNER |= {"self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm", "self_attn.k_norm": "attn_k_norm"}
INNER |= {f"mlp.{part}_proj": f"ffn_{part}" for part in ("up", "gate", "down")}
NORMS = {"input_layernorm": "attn_norm", "post_attention_layernorm": "ffn_norm"}
REORDERED_NORMS = {"post_attention_layernorm": "post_attention_norm", "post_feedforward_layernorm": "post_ffw_norm"}
SCALED_ANGLES = "rope_freqs.weight"
LLAMA3 = {"original_max_position_embeddings": 8192, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
"""What every published Llama 3 has; a file holds no more than what comes of it."""

YARN = {"beta_fast": 32.0, "beta_slow": 1.0, "truncate": True}


def their_fields(file: GgufFile) -> dict[str, Any]:
    """The config.json that a file's metadata come to; what cannot be carried is named."""
    name = file.metadata.get("general.architecture")
    if not isinstance(name, str) or name not in ARCHITECTURES:
        raise InteropError(
            f"source: general.architecture = {name!r} cannot be imported; it takes one of {', '.join(ARCHITECTURES)}"
        )
    fields: dict[str, Any] = {"model_type": ARCHITECTURES[name]}
    rope: dict[str, Any] = {"rope_type": "default", "rope_theta": 10000.0}
    for key, value in file.metadata.items():
        short = key.removeprefix(f"{name}.")
        if short == key or short in SILENT:
            continue
        if short not in FIELDS and short not in ROPE:
            raise InteropError(f"source: {key} = {str(value)[:80]} cannot be carried")
        theirs, found = {**FIELDS, **ROPE}[short], shortest(value)
        place = rope if short in ROPE or theirs == "rope_theta" else fields
        if theirs in fields and fields[theirs] != found:
            raise InteropError(f"source: {key} = {value} cannot be carried; {theirs} is {fields[theirs]}")
        place[theirs] = found
    if rope["rope_type"] == "none":
        rope["rope_type"] = "default"
    fields["rope_parameters"] = rope | llama3_angles(file, fields, rope)
    for theirs, key in SPECIAL.items():
        fields[theirs] = file.metadata.get(key)
    if "token_embd.weight" in file.entries:
        fields["vocab_size"] = file.entries["token_embd.weight"].shape[0]
    fields["tie_word_embeddings"] = "output.weight" not in file.entries
    fields["attention_bias"] = "blk.0.attn_q.bias" in file.entries
    fields["mlp_bias"] = "blk.0.ffn_up.bias" in file.entries
    return fields


def shortest(value: Any) -> Any:
    """A number in single precision as people write it: 1e-05, not 9.999999747378752e-06."""
    return float(str(np.float32(value))) if isinstance(value, float) else value


def llama3_angles(file: GgufFile, fields: dict[str, Any], rope: dict[str, Any]) -> dict[str, Any]:
    """Llama 3's scaling, which a file has as one factor per pair of features."""
    if SCALED_ANGLES not in file.entries:
        return {}
    found = file.tensor(SCALED_ANGLES).float()
    scaling = {"rope_type": "llama3", "factor": float(found.max()), **LLAMA3}
    if rope["rope_type"] != "default" or not torch.allclose(angle_factors(scaling | rope, len(found)), found, 1e-4):
        raise InteropError(f"source: the factors of {SCALED_ANGLES} are not those of Llama 3 and cannot be carried")
    return scaling


def angle_factors(rope: dict[str, Any], pairs: int) -> Tensor:
    """The factor by which each pair rotates slower under Llama 3's scaling."""
    plain = 1.0 / rope["rope_theta"] ** (torch.arange(pairs, dtype=torch.float32) / pairs)
    scaling = Scaling(
        "llama3",
        rope["factor"],
        rope["original_max_position_embeddings"],
        rope["low_freq_factor"],
        rope["high_freq_factor"],
    )
    return plain / scaling.frequencies(plain, rope["rope_theta"])


def file_metadata(theirs: Any, name: str) -> Iterator[tuple[str, Any]]:
    """Metadata of a file of their configuration; what a file cannot say is named."""
    window = getattr(theirs, "sliding_window", None)
    if window is not None and "sliding_attention" in (getattr(theirs, "layer_types", None) or ["sliding_attention"]):
        raise InteropError(f"--to: window = {window} cannot be carried by gguf; hf carries every model")
    rope = theirs.rope_parameters
    head_dim = getattr(theirs, "head_dim", None) or theirs.hidden_size // theirs.num_attention_heads
    values = {**theirs.to_dict(), "head_dim": head_dim, "rope_theta": rope["rope_theta"]}
    yield from ((f"{name}.{key}", values[field]) for key, field in FIELDS.items())
    if rope["rope_type"] == "yarn" and {field: rope.get(field, value) for field, value in YARN.items()} != YARN:
        raise InteropError(f"--to: other ends of yarn's ramp than {YARN} cannot be carried by gguf; hf carries them")
    if rope["rope_type"] == "yarn" and not math.isclose(
        rope.get("attention_factor") or yarn_size(rope["factor"]), yarn_size(rope["factor"])
    ):
        raise InteropError("--to: yarn's attention_factor cannot be carried by gguf; hf carries it")
    if rope["rope_type"] in ("linear", "yarn"):
        yield from ((f"{name}.{key}", rope[field]) for key, field in ROPE.items() if field in rope)
    if theirs.hidden_act != "silu":
        raise InteropError(f"--to: hidden_act = {theirs.hidden_act!r} cannot be carried by gguf; it takes 'silu'")
    yield from (
        (key, getattr(theirs, field)) for field, key in SPECIAL.items() if isinstance(getattr(theirs, field), int)
    )


def file_name(tensor: str, name: str) -> str:
    """GGUF's name of a tensor of a folder."""
    return _renamed(tensor, OUTER, inner_names(name), "model.layers", "blk") or _no_name(f"--to: {tensor}")


def folder_name(tensor: str, name: str) -> str:
    """The name in a folder of a file's tensor."""
    outer, inner = ({theirs: ours for ours, theirs in names.items()} for names in (OUTER, inner_names(name)))
    return _renamed(tensor, outer, inner, "blk", "model.layers") or _no_name(f"source: tensor {tensor}")


def inner_names(name: str) -> dict[str, str]:
    """Modules of a block by their names in folders and in files of an architecture."""
    return {**INNER, **(REORDERED_NORMS if name == "olmo2" else NORMS)}


def _renamed(tensor: str, outer: Mapping[str, str], inner: Mapping[str, str], before: str, after: str) -> str | None:
    module, _, leaf = tensor.rpartition(".")
    if module in outer:
        return f"{outer[module]}.{leaf}"
    block, _, part = module.removeprefix(f"{before}.").partition(".")
    return f"{after}.{block}.{inner[part]}.{leaf}" if part in inner and block.isdigit() else None


def _no_name(what: str) -> NoReturn:
    raise InteropError(f"{what} cannot be carried by gguf, which has no such name")


def permuted_rows(tensor: Tensor, file_tensor: str, name: str, heads: int, kv_heads: int, back: bool = False) -> Tensor:
    """Rows of queries and keys as llama.cpp has them: the two features of a pair side by side; `back`: as folders."""
    part = file_tensor.split(".")[-2]
    if name != "llama" or part not in ("attn_q", "attn_k"):
        return tensor
    count = heads if part == "attn_q" else kv_heads
    if not count or tensor.shape[0] % (2 * count):
        return tensor  # its shape is refused
    return tensor.unflatten(0, (count, -1, 2) if back else (count, 2, -1)).transpose(1, 2).flatten(0, 2)


def folder_tensors(file: GgufFile, theirs: Any) -> Iterator[tuple[str, Tensor]]:
    """Names and tensors of a file as a folder has them, one after the other; theirs: their configuration."""
    name = file.metadata["general.architecture"]
    heads = theirs.num_attention_heads, theirs.num_key_value_heads
    for tensor in file.entries:
        if tensor != SCALED_ANGLES:
            yield folder_name(tensor, name), permuted_rows(file.tensor(tensor), tensor, name, *heads, back=True)
