"""Small random models of every kind that can be imported, as their own library saves them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
import transformers as hf

SHAPE = {
    "vocab_size": 61,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 96,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
LONGER = {"factor": 4.0, "original_max_position_embeddings": 24, "rope_theta": 500.0}
LLAMA3 = {"rope_type": "llama3", "low_freq_factor": 1.0, "high_freq_factor": 4.0, **LONGER}
YARN = {"rope_type": "yarn", **LONGER}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2}
UNCAPPED = {"attn_logit_softcapping": None, "final_logit_softcapping": None}
LOCAL = {
    "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
    "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
}
GPT2 = {"vocab_size": 61, "n_embd": 32, "n_layer": 3, "n_head": 4, "n_positions": 96}

# What it is, the class, its settings, and the topology that it comes into.
KINDS: dict[str, tuple[str, dict[str, Any], str]] = {
    "llama": ("Llama", SHAPE, "pre"),
    "llama, attention biased": ("Llama", {**SHAPE, "attention_bias": True}, "pre"),
    "llama, FFN biased": ("Llama", {**SHAPE, "mlp_bias": True}, "pre"),
    "llama, linear": ("Llama", {**SHAPE, "rope_parameters": {"rope_type": "linear", **LONGER}}, "pre"),
    "llama, dynamic": ("Llama", {**SHAPE, "rope_parameters": {"rope_type": "dynamic", **LONGER}}, "pre"),
    "llama 3, tied": ("Llama", {**SHAPE, "rope_parameters": LLAMA3, "tie_word_embeddings": True}, "pre"),
    "llama, yarn": ("Llama", {**SHAPE, "rope_parameters": YARN}, "pre"),
    "llama, wide heads": ("Llama", {**SHAPE, "head_dim": 12}, "pre"),
    "mistral, window": ("Mistral", {**SHAPE, "sliding_window": 7}, "pre"),
    "qwen2": ("Qwen2", {**SHAPE, "tie_word_embeddings": True}, "pre"),
    "qwen3": ("Qwen3", {**SHAPE, "head_dim": 16}, "pre"),
    "qwen3, yarn, biased": ("Qwen3", {**SHAPE, "rope_parameters": YARN, "attention_bias": True}, "pre"),
    "olmo": ("Olmo", SHAPE, "pre"),
    "olmo2": ("Olmo2", SHAPE, "reordered"),
    "olmo3": ("Olmo3", {**SHAPE, "sliding_window": 7}, "reordered"),
    "gemma": ("Gemma", {**SHAPE, "head_dim": 8}, "pre"),
    "gemma2": ("Gemma2", {**SHAPE, **UNCAPPED, "head_dim": 8, "sliding_window": 7}, "sandwich"),
    "gemma3": (
        "Gemma3",
        {
            **SHAPE,
            "num_hidden_layers": 7,
            "head_dim": 8,
            "query_pre_attn_scalar": 11,
            "sliding_window": 7,
            "rope_parameters": LOCAL,
        },
        "sandwich",
    ),
    "mixtral": ("Mixtral", {**SHAPE, "num_local_experts": 4}, "pre"),
    "olmoe": ("Olmoe", {**SHAPE, **EXPERTS}, "pre"),
    "qwen3_moe": ("Qwen3Moe", {**SHAPE, **EXPERTS, "moe_intermediate_size": 24, "norm_topk_prob": True}, "pre"),
    "gpt2": ("GPT2LMHead", GPT2, "pre"),
    "gpt_neox, partly turned": ("GPTNeoX", SHAPE, "parallel"),
    "gpt_neox, one after the other": ("GPTNeoX", {**SHAPE, "use_parallel_residual": False}, "pre"),
}


def their_model(kind: str) -> Any:
    """A model with weights, norm gains and biases that are all far from their first values."""
    name, settings, _ = KINDS[kind]
    made = getattr(hf, f"{name}ForCausalLM" if not name.endswith("LMHead") else f"{name}Model")
    torch.manual_seed(0)
    model = made(made.config_class(**settings)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter) * (0.3 if parameter.dim() == 1 else 0.12))
    return model


def saved(model: Any, folder: Path, **options: Any) -> Path:
    """A folder of it."""
    model.save_pretrained(folder, **options)
    return folder
