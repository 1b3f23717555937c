"""`LanguageModel`'s own sublayers and topology as a transformers model: caches, attention backends, generate.

Weights lie where transformers' tools look for them, and a block holds everything that is used inside of it, so that
devices, shards and checkpoints can be cut between blocks::

    LanguageModel                         SiameseNormForCausalLM
    embedding                             model.embed_tokens
    blocks.L                              model.layers.L
    residual (start and end)              model.residual
    head                                  lm_head
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from transformers import PreTrainedModel
from transformers.cache_utils import Cache, DynamicCache
from transformers.generation import GenerationMixin
from transformers.masking_utils import create_causal_mask, create_sliding_window_causal_mask
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.utils.generic import can_return_tuple, merge_with_config_defaults
from transformers.utils.output_capturing import capture_outputs

from siamesenorm.errors import InteropError
from siamesenorm.interop.huggingface.blocks import HiddenState, SiameseNormAttention, SiameseNormBlock, offloaded
from siamesenorm.interop.huggingface.configuration import SiameseNormConfig
from siamesenorm.interop.huggingface.sharing import assemble
from siamesenorm.layers.cross_entropy import linear_cross_entropy
from siamesenorm.models.lm.config import MoEConfig
from siamesenorm.models.lm.init import LMFirstWeights
from siamesenorm.models.lm.model import LanguageModel
from siamesenorm.models.parametrization import width_ratio

LORA_TARGET_MODULES = ["qkv", "out", "up", "down"]
"""Every projection of a dense model, for peft's ``LoraConfig(target_modules=...)``."""

IGNORED_LABEL = -100


@dataclass
class StackOutput(BaseModelOutputWithPast):
    """What the stack gives; `expert_losses` are the balance and z-losses of MoE layers, two of each in turn."""

    expert_losses: tuple[Tensor, ...] | None = None


class SiameseNormPreTrainedModel(PreTrainedModel):
    """What all our transformers models share."""

    config: SiameseNormConfig
    config_class = SiameseNormConfig
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _no_split_modules: ClassVar[list[str]] = ["SiameseNormBlock"]
    _skip_keys_device_placement: ClassVar[list[str]] = ["past_key_values"]
    _supports_flash_attn = True
    _supports_sdpa = True
    _supports_flex_attn = True
    _supports_attention_backend = True
    _can_compile_fullgraph = True
    _can_record_outputs: ClassVar[dict[str, Any]] = {
        "hidden_states": HiddenState,
        "attentions": SiameseNormAttention,
    }

    def __init__(self, config: SiameseNormConfig) -> None:
        SiameseNormConfig.check_type(getattr(config, "model_type", None), type(config).__name__)
        super().__init__(config)

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As transformers has it, but where no block finds a weight of its own that is refused: all would be fresh."""
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        blocks = {name for name, _ in model.named_parameters() if "layers." in name}
        fresh = kwargs.get("state_dict") == {}  # nothing to load: first weights are what was asked for
        if blocks <= set(info["missing_keys"]) and not fresh:
            source = args[0] if args else kwargs.get("pretrained_model_name_or_path")
            raise InteropError(f"{str(source)!r} has no weight for a block of {cls.__name__}; it is another model's")
        return (model, info) if output_loading_info else model


class ModelParts(LanguageModel):
    """`LanguageModel` with attentions for transformers, to take the modules from."""

    attention_class = SiameseNormAttention


class SiameseNormModel(SiameseNormPreTrainedModel):
    """Embedding and stack, without a head."""

    def __init__(self, config: SiameseNormConfig) -> None:
        super().__init__(config)
        device = torch.get_default_device()
        with torch.device("meta"):
            parts = ModelParts(config.to_lm_config())
        self.embed_tokens, self.positions, self.residual = parts.embedding, parts.positions, parts.residual
        self.layers = nn.ModuleList(
            SiameseNormBlock(block.attention, block.ffn, block.links, self.residual, self.config)
            for block in parts.blocks
        )
        self.lm_config = parts.config
        self.hidden_state = HiddenState()
        self.gradient_checkpointing = False
        if device.type != "meta":
            self.to_empty(device=device)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """All first values at once: they depend on depth and topology, which no single module knows."""
        if not any(module is own for own in self.modules()):
            super()._init_weights(module)
            return
        here = [p for p in self.parameters() if not p.is_meta]  # the others wait on disk
        loaded = [p for p in here if getattr(p, "_is_hf_initialized", False)]
        if len(loaded) < len(here):
            values = [p.detach().clone() for p in loaded]
            stack = assemble(self.config, self, None)
            if not all(p.is_meta for p in stack.parameters()):  # under accelerate's or vLLM's contexts, all are
                stack.init_weights()
            for parameter, value in zip(loaded, values, strict=True):
                parameter.copy_(value)
        for own in self.modules():
            own._is_hf_initialized = True

    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        **kwargs: Any,
    ) -> StackOutput:
        """The stack's output, (batch, tokens, hidden_size)."""
        if (input_ids is None) == (inputs_embeds is None):
            raise ValueError("exactly one of input_ids and inputs_embeds must be given")
        x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache(config=self.config)
        if position_ids is None:
            past = past_key_values.get_seq_length() if past_key_values is not None else 0
            # Added, not the start of the range: a static cache gives a tensor, whose value no exported shape may need.
            position_ids = (torch.arange(x.shape[1], device=x.device) + past).unsqueeze(0)
        given = {
            "config": self.config,
            "inputs_embeds": x,
            "attention_mask": attention_mask,
            "past_key_values": past_key_values,
            "position_ids": position_ids,
        }
        c = self.lm_config
        contexts = {}
        for windowed in {c.is_windowed(block) for block in range(c.blocks)}:
            make_mask = create_sliding_window_causal_mask if windowed else create_causal_mask
            rotary = c.window_rotary if windowed else c.rotary
            contexts[windowed] = {"mask": make_mask(**given), "cos_sin": rotary.cos_sin(position_ids, c.dim_per_head)}
        if c.embedding_scale != 1:
            x = x * c.embedding_scale
        if self.positions is not None:
            x = x + self.positions(position_ids)
        if self.config.dropout:
            x = F.dropout(x, self.config.dropout, self.training)
        shared = {"past_key_values": past_key_values, "options": {**kwargs, "position_ids": position_ids}}
        wants_states = kwargs.get("output_hidden_states", self.config.output_hidden_states)
        with offloaded(self.residual):
            tensors, layout = pytree.tree_flatten(self.residual.open(x))
        expert_losses: list[Tensor] = []
        for number, block in enumerate(self.layers[: self.config.num_hidden_layers]):
            result = block(*tensors, layout=layout, **contexts[c.is_windowed(number)], **shared)
            if not isinstance(result[-1], Tensor):  # streams that grow with depth are nested otherwise behind
                *result, layout = result
            tensors = list(result[: layout.num_leaves])
            expert_losses.extend(result[layout.num_leaves :])
            if wants_states:
                self.hidden_state(x, self.residual, pytree.tree_unflatten(tensors, layout))
        with offloaded(self.residual):
            hidden = self.residual.close(pytree.tree_unflatten(tensors, layout))
        return StackOutput(
            last_hidden_state=hidden, past_key_values=past_key_values, expert_losses=tuple(expert_losses) or None
        )


class SiameseNormForCausalLM(SiameseNormPreTrainedModel, GenerationMixin):
    """A language model: logits, loss, generate."""

    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(self, config: SiameseNormConfig) -> None:
        super().__init__(config)
        self.model = SiameseNormModel(config)
        self.vocab_size = config.vocab_size
        device = torch.get_default_device()
        with torch.device("meta"):
            self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if device.type != "meta":
            self.lm_head.to_empty(device=device)
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """The head's own law; the stack has been given its values by the base model."""
        if module is self.lm_head:
            LMFirstWeights(assemble(self.config, self.model, None)).head_weight(self.lm_head.weight)
        else:
            super()._init_weights(module)

    @can_return_tuple
    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Cache | None = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        **kwargs: Any,
    ) -> CausalLMOutputWithPast:
        """Logits, and the mean cross-entropy of the next token where labels (the same ids) are given.

        logits_to_keep: logits of so many last tokens or of the tokens at these indices; 0 for all.
        shift_labels: labels that are the next tokens already, in place of `labels`.
        """
        shift_labels, counted = kwargs.pop("shift_labels", None), kwargs.pop("num_items_in_batch", None)
        outputs = self.model(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **{**kwargs, "return_dict": True},
        )
        hidden, loss, logits = outputs.last_hidden_state, None, None
        if (wide := width_ratio(self.model.lm_config)) != 1:
            hidden = hidden / wide
        wants_loss = labels is not None or shift_labels is not None
        if not wants_loss or not self.training or self.config.training_logits:
            logits = self.lm_head(kept_positions(hidden, logits_to_keep))
        if wants_loss:
            if shift_labels is None and labels is not None:
                shift_labels = next_tokens(labels)
            whole = logits if logits is not None and logits.shape[:2] == hidden.shape[:2] else None
            loss = self._cross_entropy(hidden, whole, shift_labels.to(hidden.device), counted)
            loss = loss + self._expert_loss(outputs.expert_losses)
        return CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=outputs.past_key_values,
            hidden_states=outputs.hidden_states,
            attentions=outputs.attentions,
        )

    def _cross_entropy(self, hidden: Tensor, logits: Tensor | None, labels: Tensor, counted: Any) -> Tensor:
        """Mean over the labels that count, or sum over `counted`; in chunks where all logits are not at hand."""
        z_weight = self.config.z_weight if self.training else 0.0  # held-out losses are plain, as perplexity needs them
        reduction = "mean" if counted is None else "sum"
        if logits is None and type(self.lm_head) is nn.Linear and not hasattr(self.lm_head, "_hf_hook"):
            loss = linear_cross_entropy(hidden, self.lm_head.weight, labels, z_weight=z_weight, reduction=reduction)
        else:  # an adapter or a device hook sits on the head: only calling it is right
            rows = (self.lm_head(hidden) if logits is None else logits).float().flatten(0, 1)
            loss = F.cross_entropy(rows, labels.flatten(), reduction=reduction)
            if z_weight:
                squares = rows.logsumexp(-1).square()[labels.flatten() != IGNORED_LABEL]
                loss = loss + z_weight * (squares.mean() if counted is None else squares.sum())
        return loss if counted is None else loss / torch.as_tensor(counted, device=loss.device)

    def _expert_loss(self, losses: tuple[Tensor, ...] | None) -> Tensor | float:
        """The weighted losses that keep experts balanced and routers small."""
        moe = self.config.moe
        if not losses or moe is None:
            return 0.0
        weights = MoEConfig(**moe)
        balance, z = (torch.stack([loss.to(losses[0].device) for loss in losses[kind::2]]).mean() for kind in (0, 1))
        return weights.balance_weight * balance + weights.z_weight * z

    def to_language_model(self) -> LanguageModel:
        """The same model as a `LanguageModel`; both share one set of weights."""
        return assemble(self.config, self.model, None if self.config.tie_word_embeddings else self.lm_head)


def next_tokens(labels: Tensor) -> Tensor:
    """Labels moved by one: what each token must predict; the last has nothing to."""
    return F.pad(labels, (0, 1), value=IGNORED_LABEL)[..., 1:]


def kept_positions(hidden: Tensor, keep: int | Tensor) -> Tensor:
    """What `logits_to_keep` means: so many last positions (0: all), the same positions of every row, or a row's own.

    A row's own are positions (rows, kept), or a mask (rows, length), whose positions come in one flat list.
    """
    if isinstance(keep, int):
        return hidden[:, -keep:]
    if keep.dim() < 2:
        return hidden[:, keep]
    return hidden[keep] if keep.dtype == torch.bool else hidden.take_along_dim(keep[..., None], dim=1)
