"""Our language model in vLLM: its own topology and sublayers around paged attention, on tensor and pipeline ranks.

Weights are those of ``siamesenorm export --to hf``, under their names there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from vllm.compilation.decorators import support_torch_compile
from vllm.config import VllmConfig
from vllm.distributed import get_pp_group
from vllm.model_executor.layers.logits_processor import LogitsProcessor
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.model_loader.weight_utils import default_weight_loader
from vllm.model_executor.models.interfaces import SupportsPP
from vllm.model_executor.models.utils import PPMissingLayer, make_layers, maybe_prefix
from vllm.sequence import IntermediateTensors

from siamesenorm.interop.huggingface.configuration import SiameseNormConfig
from siamesenorm.interop.vllm.streams import Wire
from siamesenorm.interop.vllm.sublayers import FusedExperts, ServedAttention, divide_attention, divided_ffn, materialise
from siamesenorm.layers.rotary import CosSin
from siamesenorm.models.lm.model import LanguageModel
from siamesenorm.models.parametrization import width_ratio
from siamesenorm.models.stack import Block
from siamesenorm.residual.depth import make_factors_plain
from siamesenorm.residual.flow import output_of


class ServedBlock(Block):
    """A block whose attention is given cos and sin of its tokens only."""

    def attend(self, h: Tensor, context: dict[bool, CosSin]) -> Any:
        """Attention with the angles of its kind: blocks with a window may have another."""
        return self.attention(h, context[bool(self.attention.windowed)])


class ServedParts(LanguageModel):
    """`LanguageModel` made for vLLM, to take the modules from."""

    attention_class = ServedAttention
    block_class = ServedBlock


@support_torch_compile(dynamic_arg_dims={"input_ids": 0, "positions": 0, "intermediate_tensors": 0, "inputs_embeds": 0})
class SiameseNormModel(nn.Module):
    """Embedding and the blocks of this pipeline rank."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        given = vllm_config.model_config.hf_config.to_dict()
        c = self.config = SiameseNormConfig.from_dict(given).to_lm_config()
        with torch.device("meta"):
            parts = ServedParts(c)
            self.residual = parts.residual.eval()
            self.received: Wire | None = None
            self.sent: Wire | None = None
        blocks: list[Any] = list(parts.blocks)

        def place(prefix: str) -> nn.Module:
            number = int(prefix.rpartition(".")[2])
            block = blocks[number].eval()
            window = c.window if c.is_windowed(number) else None
            divide_attention(block.attention, c.dim, vllm_config, window, f"{prefix}.attention")
            block.ffn = divided_ffn(block.ffn, vllm_config, f"{prefix}.ffn")
            materialise(block)
            make_factors_plain(block)
            return block

        rank = get_pp_group()
        self.embed_tokens = VocabParallelEmbedding(c.vocab_size, c.dim) if rank.is_first_rank else PPMissingLayer()
        self.positions = parts.positions if rank.is_first_rank else None
        wires = [Wire(self.residual, block) for block in range(c.blocks + 1)] if rank.world_size > 1 else []
        self.start_layer, self.end_layer, self.layers = make_layers(c.blocks, place, prefix=f"{prefix}.layers")
        if wires:
            self.received, self.sent = wires[self.start_layer], wires[self.end_layer]
        materialise(self.residual)
        if self.positions is not None:
            materialise(self.positions)

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """(tokens, dim)."""
        return self.embed_tokens(input_ids)

    def forward(
        self,
        input_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: torch.Tensor | None = None,
    ) -> torch.Tensor | IntermediateTensors:
        """The stack's output (tokens, dim), or the streams for the next rank."""
        c = self.config
        if intermediate_tensors is None:
            x = self.embed_tokens(input_ids) if inputs_embeds is None else inputs_embeds
            x = x.unsqueeze(0)
            if c.embedding_scale != 1:
                x = x * c.embedding_scale
            if self.positions is not None:
                x = x + self.positions(positions)
            streams = self.residual.open(x)
        else:
            assert self.received is not None
            streams = self.received.unpack(intermediate_tensors.tensors)
        cos_sin_tables = {
            True: c.window_rotary.cos_sin(positions, c.dim_per_head),
            False: c.rotary.cos_sin(positions, c.dim_per_head),
        }
        for block in self.layers[self.start_layer : self.end_layer]:
            streams, h = block.before(streams)
            streams, h = block.between(streams, *output_of(block.attend(h, cos_sin_tables)))
            streams = block.links[-1].add(streams, *output_of(block.ffn(h)))
        if not get_pp_group().is_last_rank:
            assert self.sent is not None
            return IntermediateTensors(self.sent.pack(streams))
        return self.residual.close(streams).squeeze(0)


class SiameseNormForCausalLM(nn.Module, SupportsPP):
    """A language model on any topology, as vLLM runs it."""

    def __init__(self, *, vllm_config: VllmConfig, prefix: str = "") -> None:
        super().__init__()
        self.model = SiameseNormModel(vllm_config=vllm_config, prefix=maybe_prefix(prefix, "model"))
        c, self.quant_config = self.model.config, vllm_config.quant_config
        self.lm_head: nn.Module = PPMissingLayer()
        if get_pp_group().is_last_rank:
            head = ParallelLMHead(c.vocab_size, c.dim, prefix=maybe_prefix(prefix, "lm_head"))
            both = c.tied and get_pp_group().is_first_rank
            self.lm_head = head.tie_weights(self.model.embed_tokens) if both else head
        self.logits_processor = LogitsProcessor(c.vocab_size)

    def make_empty_intermediate_tensors(
        self, batch_size: int, dtype: torch.dtype, device: torch.device
    ) -> IntermediateTensors:
        """What this rank receives, before it is received."""
        assert self.model.received is not None
        return IntermediateTensors(self.model.received.empty(batch_size, dtype, device))

    def embed_input_ids(self, input_ids: Tensor) -> Tensor:
        """(tokens, dim)."""
        return self.model.embed_input_ids(input_ids)

    def forward(
        self,
        input_ids: Tensor | None,
        positions: Tensor,
        intermediate_tensors: IntermediateTensors | None = None,
        inputs_embeds: Tensor | None = None,
    ) -> Tensor | IntermediateTensors:
        """As the model's."""
        return self.model(input_ids, positions, intermediate_tensors, inputs_embeds)

    def compute_logits(self, hidden_states: Tensor) -> Tensor | None:
        """Logits of the vocabulary."""
        return self.logits_processor(self.lm_head, hidden_states / width_ratio(self.model.config))

    def load_weights(self, weights: Iterable[tuple[str, Tensor]]) -> set[str]:
        """Take what belongs to this rank; a weight that is missing or unknown is refused."""
        own: dict[str, tuple[str, Callable[[Tensor], None]]] = {}
        parameters = dict(self.named_parameters())
        for path, module in self.named_modules():
            if isinstance(module, FusedExperts):
                for name, (inner, load) in module.loaders().items():
                    own[f"{path}.{name}"] = f"{path}.{inner}", load
                    del parameters[f"{path}.{inner}"]
        for name, tensor in [*parameters.items(), *self.named_buffers()]:
            if ".paged." not in name and ".fused." not in name:  # those are vLLM's
                load = partial(getattr(tensor, "weight_loader", default_weight_loader), tensor)
                own[name.replace("_norm.norm.", "_norm.")] = name, load  # of a norm that is gathered for
        tied, loaded, unknown = self.model.config.tied, set[str](), []
        for name, weight in weights:
            names = [name, "lm_head.weight"] if tied and name == "model.embed_tokens.weight" else [name]
            for wanted in names:
                if wanted in own:
                    full, load = own[wanted]
                    load(weight)
                    loaded.add(full)
                elif wanted == name and not self._is_elsewhere(name):
                    unknown.append(name)
        missing = [name for name, (full, _) in own.items() if full not in loaded]
        if unknown or missing:
            raise ValueError(
                f"weights: {len(missing)} are missing (first: {missing[:3]}), {len(unknown)} unknown "
                f"(first: {unknown[:3]}); the folder is not of this topology and shape"
            )
        return loaded

    def _is_elsewhere(self, name: str) -> bool:
        """Whether a weight belongs to another pipeline rank, or is the head of a tied model."""
        if name.startswith("model.layers."):
            return not self.model.start_layer <= int(name.split(".")[2]) < self.model.end_layer
        return name.startswith(("model.embed_tokens.", "model.positions.", "lm_head."))
