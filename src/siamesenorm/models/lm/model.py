"""The language model: embedding, a stack of (attention, FFN or MoE) blocks on any topology, head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.jit._trace import is_tracing

from siamesenorm.layers.attention import Attention, AttentionContext
from siamesenorm.layers.cache import KeyValueCache
from siamesenorm.layers.cross_entropy import linear_cross_entropy, logits_cross_entropy
from siamesenorm.layers.linear import Linear, linear
from siamesenorm.layers.mask import document_positions, takes_blocks, visibility
from siamesenorm.layers.mlp import MLP
from siamesenorm.layers.moe import MoE
from siamesenorm.layers.rotary import Rotary
from siamesenorm.models.lm.config import LMConfig
from siamesenorm.models.lm.init import LMFirstWeights
from siamesenorm.models.stack import Stack
from siamesenorm.residual import Place
from siamesenorm.residual.hooks import has_hooks


@dataclass
class LMOutput:
    """What a forward pass gives; fields that were not asked for are None."""

    hidden: Tensor
    """(batch, tokens, dim): the stack's output, after its final norm."""
    logits: Tensor | None = None
    """(batch, tokens kept, vocabulary); None where labels were given, unless logits were asked for too."""
    loss: Tensor | None = None
    """Mean cross-entropy over the labels, with the auxiliary losses of experts."""
    cache: KeyValueCache | None = None
    """The cache that was given, now holding this pass's tokens."""
    experts: tuple[Any, ...] = ()
    """What each MoE layer reported, in order of depth."""
    cross_entropy: Tensor | None = None
    """The loss without auxiliary parts, detached; what perplexity is made of."""


class LanguageModel(Stack[LMConfig]):
    """A decoder-only Transformer on any residual topology.

    ::

        model = LanguageModel(LMConfig(vocab_size=256, dim=64, blocks=4, heads=4, ffn_dim=192))
        model(ids).logits                      # (batch, tokens, 256)
        model(ids[:, :-1], labels=ids[:, 1:]).loss.backward()
    """

    attention_class: ClassVar[type[Attention]] = Attention
    first_weights = LMFirstWeights

    def build(self, fused: bool) -> None:
        """Embedding, blocks, and a head where it is not the embedding itself."""
        c = self.config
        self.embedding = nn.Embedding(c.vocab_size, c.dim)
        self.positions = nn.Embedding(c.max_length, c.dim) if c.learned_positions else None
        self.make_blocks(c.norm_spec, fused)
        self.head = None if c.tied else Linear(c.dim, c.vocab_size, bias=False)
        # Where processes divide the vocabulary, others stand here (train/parallel/vocabulary.py).
        self.project: Callable[[Tensor, Tensor], Tensor] = linear
        self.cross_entropy: Callable[..., Tensor] = linear_cross_entropy

    def make_attention(self, place: Place) -> Attention:
        """Grouped queries and rotary positions, as the configuration has them."""
        c = self.config
        return self.attention_class(
            c.dim,
            c.heads,
            c.num_kv_heads,
            c.dim_per_head,
            needs=self.residual.needs(place),
            norm=c.norm_spec.ungated,
            qk_norm=c.qk_norm,
            bias=c.bias,
            qkv_bias=c.qkv_bias,
            query_factor=c.query_factor,
            windowed=c.is_windowed(place.block),
            layer=place.block,
        )

    def make_ffn(self, place: Place) -> nn.Module:
        """An MLP, or experts."""
        c, needs = self.config, self.residual.needs(place)
        if c.moe is None:
            return MLP(c.dim, c.ffn_dim, needs=needs, norm=c.norm_spec.ungated, activation=c.activation, bias=c.bias)
        return MoE(
            c.dim,
            c.moe.expert_dim,
            c.moe.experts,
            c.moe.top_k,
            activation=c.activation,
            bias=c.bias,
            normalize_top_k=c.moe.normalize_top_k,
            output_norm=needs.inner("out", c.norm_spec.ungated) if needs.output_norm else None,
        )

    @property
    def head_weight(self) -> Tensor:
        """(vocabulary, dim): the head's matrix, the embedding's own where they are tied."""
        return self.embedding.weight if self.head is None else self.head.weight

    def forward(
        self,
        input_ids: Tensor,
        *,
        labels: Tensor | None = None,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: KeyValueCache | None = None,
        logits_to_keep: int | Tensor | None = None,
    ) -> LMOutput:
        """Logits of every token, or the loss where labels are given.

        input_ids: (batch, tokens). labels: the same shape, already the next tokens; -100 does not count.
        positions: (tokens,) or (batch, tokens), where they are not what documents, padding and cache say.
        document_ids: (batch, tokens) of rows packed from several documents, which do not see each other.
        attention_mask: (batch, tokens), 0 on the filling at the left of short rows, 1 elsewhere.
        cache: keys and values of earlier tokens (`new_cache`); this pass's are added.
        logits_to_keep: logits for so many last tokens, or the tokens at these indices; 0 for none at all.
        Default: all, or none where labels are given.
        """
        context, places = self.context_and_positions(input_ids, positions, document_ids, attention_mask, cache)
        x = self.embed(input_ids, places)
        hidden, experts = self.through(x, context)
        if cache is not None:
            cache.advance(input_ids.shape[1])
        output = LMOutput(hidden, cache=cache, experts=tuple(experts))
        if labels is not None:
            self.add_loss(output, labels)
        if labels is None or logits_to_keep is not None:
            output.logits = self.logits(hidden, logits_to_keep)
        return output

    def context(self, input_ids: Tensor, **given: Any) -> AttentionContext:
        """What all attentions of one pass share: rotary angles, who sees whom, the cache; given: see `forward`."""
        return self.context_and_positions(input_ids, **given)[0]

    def embed(self, input_ids: Tensor, positions: Tensor | slice) -> Tensor:
        """What the stack begins with, of tokens at these positions."""
        x = self.embedding(input_ids)
        if self.config.embedding_scale != 1:
            x = x * self.config.embedding_scale
        if self.positions is not None:
            if isinstance(positions, slice):
                positions = torch.arange(positions.start, positions.stop, device=input_ids.device)
            x = x + self.positions(positions)
        return F.dropout(x, self.config.dropout, self.training) if self.config.dropout else x

    def context_and_positions(
        self,
        input_ids: Tensor,
        positions: Tensor | None = None,
        document_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        cache: KeyValueCache | None = None,
    ) -> tuple[AttentionContext, Tensor | slice]:
        """`context`, and the positions of the tokens."""
        c, (rows, tokens), device = self.config, input_ids.shape, input_ids.device
        past = cache.length if cache is not None else 0
        if past + tokens > c.max_length:
            raise ValueError(f"input_ids: {past + tokens} tokens are more than max_length = {c.max_length}")
        padding = None if attention_mask is None else left_padding(attention_mask)
        if cache is not None:
            cache.check_room(rows, tokens)
            if past == 0:
                cache.padding = padding
            padding = cache.padding
            if document_ids is not None:
                raise ValueError("document_ids: packed documents cannot be decoded; give one document per row")
        places: Tensor | slice | None = positions
        if places is None and cache is not None and padding is None:
            places = slice(past, past + tokens)
        elif places is None:
            places = torch.arange(past, past + tokens, device=device)
            if document_ids is not None:
                places = document_positions(document_ids)
            elif padding is not None:
                places = (places - padding[:, None]).clamp(min=0)

        def seen(window: int | None, rotary: Rotary) -> AttentionContext:
            visible = visibility(
                tokens,
                past + tokens,
                window=window,
                document_ids=document_ids,
                padding=padding,
                device=device,
                blocks=takes_blocks(device, c.dim_per_head),
            )
            if cache is not None:
                return AttentionContext(cache.cos_sin(places, rotary), visible, cache)
            assert not isinstance(places, slice)  # there are slices with a cache only
            return AttentionContext(rotary.cos_sin(places, c.dim_per_head), visible)

        if c.full_every is None:
            return seen(c.window, c.window_rotary), places
        return replace(seen(None, c.rotary), windowed=seen(c.window, c.window_rotary)), places

    def logits(self, hidden: Tensor, keep: int | Tensor | None = None) -> Tensor:
        """The head on all tokens, on the last `keep` ones or on those at the indices `keep`."""
        if isinstance(keep, Tensor):
            hidden = hidden[:, keep]
        elif keep is not None:
            if keep < 0:
                raise ValueError(f"logits_to_keep: {keep} is not allowed; it takes 0 or more, or indices")
            hidden = hidden[:, -keep:] if keep else hidden[:, :0]
        hidden = self.for_head(hidden)
        return self.project(hidden, self.embedding.weight) if self.head is None else self.head(hidden)

    def add_loss(self, output: LMOutput, labels: Tensor) -> None:
        """The loss of a pass that has come to its end."""
        hidden = self.for_head(output.hidden)
        z_weight = self.config.z_weight if self.training else 0.0  # held-out losses are plain, as perplexity needs them
        if self.head is not None and (type(self.head) is not Linear or has_hooks(self.head)):
            # An adapter or a hook sits on the head: only calling it is right.
            loss = logits_cross_entropy(self.head(hidden), labels, z_weight=z_weight)
        else:
            loss = self.cross_entropy(hidden, self.head_weight, labels, z_weight=z_weight)
        output.cross_entropy = loss.detach()
        if self.config.moe is not None and output.experts:
            layers = len(output.experts)
            balance = sum(stats.balance_loss for stats in output.experts) / layers
            z = sum(stats.z_loss for stats in output.experts) / layers
            loss = loss + self.config.moe.balance_weight * balance + self.config.moe.z_weight * z
        output.loss = loss

    def new_cache(self, batch: int, max_length: int | None = None) -> KeyValueCache:
        """An empty cache for `batch` rows of up to `max_length` tokens, in the dtype and on the device of the model."""
        c, weight = self.config, self.embedding.weight
        kind, dtype = weight.device.type, weight.dtype
        if torch.is_autocast_enabled(kind):
            dtype = torch.get_autocast_dtype(kind)
        length = max_length or c.max_length
        # A process of a tensor group has some of the heads.
        heads = next(module.kv_heads for module in self.modules() if isinstance(module, Attention))
        return KeyValueCache(c.blocks, batch, heads, length, c.dim_per_head, device=weight.device, dtype=dtype)


def left_padding(attention_mask: Tensor) -> Tensor | None:
    """(batch,) filling tokens at the left of each row, None where there are none."""
    padding = (attention_mask == 0).sum(-1)
    index = torch.arange(attention_mask.shape[1], device=attention_mask.device)
    if not torch.equal(index >= padding[:, None], attention_mask != 0):
        raise ValueError("attention_mask: zeros are allowed at the left of a row only")
    return padding if is_tracing() or bool(padding.any()) else None  # a trace must serve rows with filling too
