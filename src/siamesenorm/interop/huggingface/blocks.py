"""Attention and block as transformers wants them: its attention backends, its caches, its checkpointing and hooks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers.cache_utils import Cache
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from siamesenorm.interop.huggingface.configuration import SiameseNormConfig
from siamesenorm.layers.attention import Attention
from siamesenorm.layers.rotary import CosSin
from siamesenorm.residual import Link, Topology


def eager_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float,
    dropout: float = 0.0,
    **kwargs: Any,
) -> tuple[Tensor, Tensor]:
    """Attention in plain operators, which can return its weights; the mask is added to the scores."""
    groups = query.shape[1] // key.shape[1]
    key, value = (part.repeat_interleave(groups, dim=1) if groups > 1 else part for part in (key, value))
    scores = query @ key.transpose(2, 3) * scaling
    if attention_mask is not None:
        scores = scores + attention_mask
    weights = scores.softmax(-1, dtype=torch.float32).to(query.dtype)
    weights = F.dropout(weights, dropout, module.training)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class SiameseNormAttention(Attention):
    """Our attention, its softmax by the backend that the config names and its cache transformers' own."""

    config: SiameseNormConfig

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.layer_idx, self.is_causal = self.layer, True
        self.num_key_value_groups = self.heads // self.kv_heads
        self.scaling = self.head_dim**-0.5  # by this name: serving engines look for it

    def forward(  # type: ignore[override]  # the context is transformers' here
        self, h: Tensor, cos_sin: CosSin, mask: Any, past_key_values: Cache | None, options: dict[str, Any]
    ) -> tuple[Tensor, Tensor | None]:
        """(batch, tokens, dim) to the same, and the attention weights where the backend has them."""
        backend: Callable[..., Any] = ALL_ATTENTION_FUNCTIONS.get_interface(
            self.config._attn_implementation, eager_attention
        )
        window = self.config.sliding_window if self.windowed else None
        q, k, v = (part.transpose(1, 2) for part in self.project_and_rotate(h, cos_sin))
        if past_key_values is not None:
            k, v = past_key_values.update(k, v, self.layer_idx)
        o, weights = backend(self, q, k, v, mask, scaling=self.scaling, dropout=0.0, sliding_window=window, **options)
        o = o.reshape(*h.shape[:-1], q.shape[1] * q.shape[-1])  # serving engines give it as rows of tokens
        return self.output(o), weights


class SiameseNormBlock(GradientCheckpointingLayer):
    """Attention, FFN and the links that join them to the residual streams: tensors in, tensors out."""

    def __init__(self, attention: Any, ffn: Any, links: Any, topology: Topology, config: SiameseNormConfig) -> None:
        super().__init__()
        attention.config = config
        self.attention, self.ffn, self.links = attention, ffn, nn.ModuleList(links)
        self.before, self.between = topology.step(None, self.links[0]), topology.step(*self.links)  # type: ignore[arg-type]

    def forward(
        self,
        *streams: Tensor,
        layout: Any,
        cos_sin: CosSin,
        mask: Any,
        past_key_values: Cache | None = None,
        options: dict[str, Any],
    ) -> tuple[Any, ...]:
        """The streams behind the block, then the losses of experts if it has any.

        Streams are tensors in the order of pytree, `layout` their structure; where it is another behind the block
        (streams grow with depth), that comes last.
        """
        with offloaded(self.links):
            carried, h = self.before(pytree.tree_unflatten(streams, layout))
            carried, h = self.between(carried, self.attention(h, cos_sin, mask, past_key_values, options)[0])
            result = self.ffn(h)
            output, *reported = result if isinstance(result, tuple) else (result,)
            carried = self.links[-1].add(carried, output)  # type: ignore[operator]
        leaves, behind = pytree.tree_flatten(carried)
        losses = [loss for stats in reported for loss in (stats.balance_loss, stats.z_loss)]
        return *leaves, *losses, *(() if behind == layout else (behind,))


class HiddenState(nn.Module):
    """What the stack would give out if it ended here: the head on it is the logit lens, for any topology."""

    def forward(self, embedding: Tensor, topology: Topology, streams: Any) -> Tensor:
        """The streams closed by the topology. `embedding` stands first for those who record a first hidden state."""
        with offloaded(topology):
            return topology.close(streams)


@contextlib.contextmanager
def offloaded(module: nn.Module) -> Iterator[None]:
    """Bring the parameters that links hold themselves, where accelerate keeps weights elsewhere between calls.

    It wraps `forward`; what links hold is needed from `read` to `write`, so the wrapping is off meanwhile.
    """
    silent: list[Any] = [
        part for part in module.modules() if isinstance(part, (Link, Topology)) and hasattr(part, "_hf_hook")
    ]
    wrapped = [vars(part).pop("forward") for part in silent]
    try:
        for part in silent:
            part._hf_hook.pre_forward(part)
        yield
    finally:
        for part, forward in zip(silent, wrapped, strict=True):
            part._hf_hook.post_forward(part, None)
            part.forward = forward
