"""Our sublayers on vLLM's: keys and values in its pages, weights divided among its tensor-parallel ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from vllm.config import VllmConfig
from vllm.distributed import (
    get_tensor_model_parallel_rank,
    get_tensor_model_parallel_world_size,
    tensor_model_parallel_all_gather,
)
from vllm.model_executor.layers.attention import Attention as PagedAttention
from vllm.model_executor.layers.fused_moe import FusedMoEFactory
from vllm.model_executor.layers.linear import MergedColumnParallelLinear, QKVParallelLinear, RowParallelLinear
from vllm.platforms import current_platform

from siamesenorm.layers.attention import Attention
from siamesenorm.layers.mlp import GATED, MLP
from siamesenorm.layers.moe import MoE
from siamesenorm.layers.rotary import CosSin

FUSED_WIDTHS = 32
"""vLLM's fused experts on CPU take multiples of it."""


class ServedAttention(Attention):
    """Our attention on tokens of many requests in one row: who sees whom is the pages' business."""

    paged: PagedAttention

    def forward(self, h: Tensor, cos_sin: CosSin) -> Tensor:  # type: ignore[override]  # there is no context here
        """(1, tokens, dim) to the same."""
        more = self.paged.head_size - self.head_dim
        q, k, v = (heads.squeeze(0) for heads in self.project_and_rotate(h, cos_sin))
        if more:  # zeros change no product
            q, k, v = (F.pad(heads, (0, more)) for heads in (q, k, v))
        o = self.paged(q.flatten(1), k.flatten(1), v.flatten(1))
        if more:
            o = o.unflatten(-1, (self.heads, -1))[..., : self.head_dim].flatten(1)
        return self.output(o.unsqueeze(0))


class WholeNorm(nn.Module):
    """A norm over features that are divided among the ranks: they are gathered for it."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, x: Tensor) -> Tensor:
        """The share of the normed features that is of this rank."""
        whole = self.norm(tensor_model_parallel_all_gather(x.contiguous()))
        return whole.chunk(get_tensor_model_parallel_world_size(), dim=-1)[get_tensor_model_parallel_rank()]


def divide_attention(attention: ServedAttention, dim: int, vllm: VllmConfig, window: int | None, prefix: str) -> None:
    """Give an attention its projections on this rank and its place among the pages."""
    ranks, heads, kv_heads, width = _ranks(), attention.heads, attention.kv_heads, attention.head_dim
    if heads % ranks or max(kv_heads, ranks) % min(kv_heads, ranks):
        raise ValueError(
            f"tensor_parallel_size = {ranks} is not allowed; "
            f"it takes a divisor of {heads} heads that divides {kv_heads} key-value heads or is a multiple of them"
        )
    if ranks > kv_heads and attention.norm_kind == "qk_projection":
        raise ValueError(
            f"tensor_parallel_size = {ranks} is not allowed; "
            f"it takes 1 to {kv_heads} where keys are normed over all {kv_heads} heads"
        )
    how: dict[str, Any] = {"return_bias": False, "quant_config": vllm.quant_config}
    bias = attention.qkv.bias is not None, attention.out.bias is not None
    attention.qkv = QKVParallelLinear(dim, width, heads, kv_heads, bias=bias[0], prefix=f"{prefix}.qkv", **how)
    attention.out = RowParallelLinear(heads * width, dim, bias=bias[1], prefix=f"{prefix}.out", **how)
    attention.heads, attention.kv_heads = heads // ranks, max(1, kv_heads // ranks)
    if ranks > 1:
        names = ("q_norm", "k_norm", "out_norm") if attention.norm_kind == "qk_projection" else ("out_norm",)
        _gather(attention, names)
    attention.paged = PagedAttention(
        attention.heads,
        paged_width(width),
        width**-0.5,
        num_kv_heads=attention.kv_heads,
        cache_config=vllm.cache_config,
        quant_config=vllm.quant_config,
        per_layer_sliding_window=window,
        prefix=f"{prefix}.paged",
    )


def paged_width(width: int) -> int:
    """The least width of heads from this one on that vLLM's attention takes."""
    if current_platform.is_cpu():
        from vllm.v1.attention.backends.cpu_attn import CPUAttentionBackend

        return min((size for size in CPUAttentionBackend.get_supported_head_sizes() if size >= width), default=width)
    return -(-width // 8) * 8


def divide_mlp(mlp: MLP, vllm: VllmConfig, prefix: str) -> None:
    """Give an FFN its projections on this rank."""
    (inner, dim), hidden = mlp.up.weight.shape, mlp.down.in_features
    if hidden % _ranks():
        raise ValueError(f"tensor_parallel_size = {_ranks()} is not allowed; it takes a divisor of ffn_dim = {hidden}")
    how: dict[str, Any] = {"return_bias": False, "quant_config": vllm.quant_config, "bias": mlp.up.bias is not None}
    parts = [hidden] * (inner // hidden if mlp.activation in GATED else 1)  # value and gate are divided each
    mlp.up = MergedColumnParallelLinear(dim, parts, prefix=f"{prefix}.up", **how)
    mlp.down = RowParallelLinear(hidden, dim, prefix=f"{prefix}.down", **how)
    if _ranks() > 1:
        _gather(mlp, ("out_norm",))


class FusedExperts(nn.Module):
    """A mixture of SwiGLU experts in vLLM's fused kernels: units of each divided among the ranks, the router whole."""

    def __init__(self, moe: MoE, vllm: VllmConfig, prefix: str) -> None:
        super().__init__()
        if moe.hidden % _ranks():
            raise ValueError(
                f"tensor_parallel_size = {_ranks()} is not allowed; it takes a divisor of expert_dim = {moe.hidden}"
            )
        self.router, self.hidden = moe.router, moe.hidden
        self.fused = FusedMoEFactory(
            num_experts=moe.experts,
            top_k=moe.top_k,
            hidden_size=moe.dim,
            intermediate_size=moe.hidden,
            renormalize=moe.normalize_top_k,
            quant_config=vllm.quant_config,
            prefix=f"{prefix}.fused",
        )

    def forward(self, h: Tensor) -> Tensor:
        """(1, tokens, dim) to the same."""
        tokens = h.squeeze(0)
        return self.fused(hidden_states=tokens, router_logits=self.router(tokens)).unsqueeze(0)

    def loaders(self) -> dict[str, tuple[str, Callable[[Tensor], None]]]:
        """By the names that the export has: the parameter's name here, and what takes its weights."""
        named = dict(self.named_parameters())
        (w_in,) = (name for name in named if name.endswith("w13_weight"))
        (w_out,) = (name for name in named if name.endswith("w2_weight"))

        def load(name: str, shard: str, weights: Tensor) -> None:
            for number, weight in enumerate(weights):
                cast(Any, named[name]).weight_loader(named[name], weight, name, shard, number)

        def load_in(weights: Tensor) -> None:
            value, gate = weights.split(self.hidden, dim=1)  # vLLM has the gate first
            load(w_in, "w1", gate)
            load(w_in, "w3", value)

        return {"w_in": (w_in, load_in), "w_out": (w_out, partial(load, w_out, "w2"))}


def divided_ffn(ffn: nn.Module, vllm: VllmConfig, prefix: str) -> nn.Module:
    """An FFN or a mixture of experts on this rank; experts that vLLM's kernels do not have stay ours, whole."""
    if isinstance(ffn, MLP):
        divide_mlp(ffn, vllm, prefix)
    elif isinstance(ffn, MoE):
        plain = ffn.activation == "swiglu" and ffn.b_in is None and ffn.out_norm is None
        if plain and ffn.dim % FUSED_WIDTHS == 0:
            return FusedExperts(ffn, vllm, prefix)
    return ffn


def _gather(module: nn.Module, norms: tuple[str, ...]) -> None:
    for name in norms:
        if getattr(module, name) is not None:
            setattr(module, name, WholeNorm(getattr(module, name)))


def _ranks() -> int:
    return get_tensor_model_parallel_world_size()


def materialise(module: nn.Module) -> None:
    """Room for the parameters and buffers that are on ``meta`` yet, on the default device and in the default dtype."""
    for part in module.modules():
        for name, parameter in part._parameters.items():
            if parameter is not None and parameter.is_meta:
                made = torch.empty(parameter.shape, dtype=torch.get_default_dtype())
                part._parameters[name] = nn.Parameter(made, requires_grad=False)
        for name, buffer in part._buffers.items():
            if buffer is not None and buffer.is_meta:
                part._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype)
