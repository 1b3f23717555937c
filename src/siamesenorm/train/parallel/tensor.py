"""Tensor parallelism of any model: each process has some heads and some columns of the FFN.

A sublayer's first matrix is split by rows and its last by columns; the outputs are summed once a sublayer
(arXiv 1909.08053). Streams are ordinary tensors, so that topologies and their fused steps run as they are: the same
in every process of a group, or, in a language model, each process's own tokens (`sequence`). Its embedding,
head and loss are divided by the vocabulary (`vocabulary`).
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from siamesenorm.errors import ConfigError
from siamesenorm.layers.attention import Attention
from siamesenorm.layers.mlp import GATED, MLP
from siamesenorm.layers.moe import MoE
from siamesenorm.models.lm import LanguageModel
from siamesenorm.models.stack import Block, Stack
from siamesenorm.residual.ramp import ramps_of
from siamesenorm.train.parallel.sequence import TokenPlacement, on_own_tokens, replicate_parameters, replicated
from siamesenorm.train.parallel.vocabulary import Vocabulary, divides_vocabulary
from siamesenorm.train.tensor_layout import ROW_ORDER

HEADS = FEATURES = 2
"""Dimension of (batch, tokens, heads, head_dim) and of (batch, tokens, features) that is split."""


class TensorParallel:
    """A model over the processes of a mesh, one part after the other.

    sequence, loss: whether language models divide streams by tokens, and embedding, head and loss by the vocabulary;
    default: where they can.
    """

    def __init__(
        self, model: nn.Module, mesh: DeviceMesh, sequence: bool | None = None, loss: bool | None = None
    ) -> None:
        if not isinstance(model, Stack):
            kind = type(model).__name__
            raise ConfigError.refused("parallel.mode", "tp", "it splits models of siamesenorm", when=f"for {kind}")
        self.model, self.mesh, language = model, mesh, isinstance(model, LanguageModel)
        for name, wish in (("sequence_parallel", sequence), ("loss_parallel", loss)):
            if wish and not language:
                kind = type(model).__name__
                raise ConfigError(f"parallel.{name}: true is not allowed for {kind}; it takes language models")
        self.tokens = TokenPlacement(mesh, language and sequence is not False)
        self.vocabulary: Vocabulary | None = None
        if isinstance(model, LanguageModel):
            self._take(model, loss)

    def _take(self, model: LanguageModel, loss: bool | None) -> None:
        """What surrounds a language model's blocks."""
        tokens, residual, size = self.tokens, model.residual, model.config.vocab_size
        model.embedding.register_forward_pre_hook(lambda _, inputs: tokens.begin(inputs[0].shape[1]))
        if divides_vocabulary(loss, size, self.mesh.size()):
            self.vocabulary = Vocabulary(self.mesh, size)
            self.vocabulary.take(model, tokens)
        elif tokens.divide:
            model.embedding.register_forward_hook(lambda _, inputs, out: tokens.own(out))
        if not tokens.divide:
            return
        if model.positions is not None:
            model.positions.register_forward_hook(lambda _, inputs, out: tokens.own(out, out.dim() - 2))
        close = on_own_tokens(residual.close, residual)
        residual.open = on_own_tokens(residual.open, residual)  # type: ignore[method-assign]
        residual.close = lambda streams: tokens.whole(close(streams))  # type: ignore[method-assign]

    def part(self, part: nn.Module) -> None:
        """Split a part of the model: a block, or what surrounds them."""
        model: Any = self.model
        if isinstance(part, Block):
            split_sublayers(part, self.mesh, self.tokens)
            if self.tokens.divide:
                divide_streams(part, self.mesh)
        elif part is getattr(model, "residual", None) and self.tokens.divide:
            replicate_parameters(part, self.mesh)
        elif self.vocabulary is not None and part in (model.embedding, model.head):
            part.weight = self.vocabulary.split(part.weight)  # type: ignore[arg-type]


def divide_streams(block: Block, mesh: DeviceMesh) -> None:
    """Let a block's links run on the tokens that a process has."""
    first, second = block.links
    add: Any = second.add
    replicate_parameters(block.links, mesh)
    block.before = on_own_tokens(block.before, first)  # type: ignore[assignment]
    block.between = on_own_tokens(block.between, first, second)  # type: ignore[assignment]
    second.add = on_own_tokens(add, second)  # type: ignore[assignment]


def split_sublayers(block: Block, mesh: DeviceMesh, tokens: TokenPlacement | None = None) -> None:
    """Split a block's attention and FFN over the processes of a mesh; experts stay whole.

    tokens: how the streams lie; default: the same in every process.
    """
    if mesh.size() == 1:
        return
    tokens = tokens or TokenPlacement(mesh, divide=False)
    if isinstance(block.attention, Attention):
        split_attention(block.attention, mesh, tokens)
    if isinstance(block.ffn, MLP):
        split_ffn(block.ffn, mesh, tokens)
    elif isinstance(block.ffn, MoE):
        tokens.gather_for_experts(block.ffn)


def split_attention(attention: Attention, mesh: DeviceMesh, tokens: TokenPlacement) -> None:
    """Equal numbers of heads of q, k and v to every process."""
    refuse_growing(attention)
    size, width = mesh.size(), attention.head_dim
    for name, heads in (("heads", attention.heads), ("kv_heads", attention.kv_heads)):
        if heads % size:
            raise ConfigError.refused("parallel.group", size, f"model.{name} = {heads} is no multiple", when="for tp")
    sizes = [attention.heads * width, attention.kv_heads * width, attention.kv_heads * width]
    reorder(attention.qkv, together(sizes, size))
    attention.heads, attention.kv_heads = attention.heads // size, attention.kv_heads // size
    plan: dict[str, ParallelStyle] = {"qkv": ColwiseParallel(), "out": SummedRows(tokens)}
    whole_projection = attention.norm_kind == "qk_projection"
    for name in ("q_norm", "k_norm", "v_norm"):
        if getattr(attention, name) is not None:
            plan[name] = SplitNorm(HEADS, along_features=whole_projection)
    if attention.out_norm is not None:
        plan["out_norm"] = SplitNorm(FEATURES, along_features=True)
    parallelize_module(attention, mesh, plan)
    tokens.gather_for_sublayer(attention)


def split_ffn(ffn: MLP, mesh: DeviceMesh, tokens: TokenPlacement) -> None:
    """Equal parts of the hidden width to every process."""
    refuse_growing(ffn)
    size, hidden = mesh.size(), ffn.down.in_features
    if hidden % size:
        raise ConfigError.refused("parallel.group", size, f"model.ffn_dim = {hidden} is no multiple", when="for tp")
    if ffn.activation in GATED:
        reorder(ffn.up, together([hidden, hidden], size))
    plan: dict[str, ParallelStyle] = {"up": ColwiseParallel(), "down": SummedRows(tokens)}
    if ffn.out_norm is not None:
        plan["out_norm"] = SplitNorm(FEATURES, along_features=True)
    parallelize_module(ffn, mesh, plan)
    tokens.gather_for_sublayer(ffn)


def refuse_growing(sublayer: nn.Module) -> None:
    """Raise where norms inside grow in: there is no split form of them."""
    if ramps_of(sublayer):
        growing = "while norms inside sublayers grow in (blend)"
        raise ConfigError.refused("parallel.mode", "tp", "take fsdp", growing)


def together(sizes: list[int], parts: int) -> Tensor:
    """Order of rows that brings the p-th part of every section together, for p = 0, 1, …"""
    sections = torch.arange(sum(sizes)).split(sizes)
    return torch.cat([section.chunk(parts)[p] for p in range(parts) for section in sections])


@torch.no_grad()
def reorder(linear: nn.Linear, order: Tensor) -> None:
    """Put a matrix's rows into an order, and note it for files."""
    for parameter in linear.parameters():
        parameter.copy_(parameter[order.to(parameter.device)])
    setattr(linear, ROW_ORDER, order)


class SummedRows(RowwiseParallel):
    """The last matrix of a sublayer; its output is an ordinary tensor, which fused steps take.

    The style's own sum comes as a promise to be waited for, of another type.
    """

    def __init__(self, tokens: TokenPlacement) -> None:
        super().__init__(output_layouts=Partial(), use_local_output=False)
        self.tokens = tokens

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        module.register_forward_hook(lambda _, inputs, out: self.tokens.scatter(out))
        return module


class SplitNorm(ParallelStyle):
    """A norm whose input is split along a dimension: along heads, or along the features that it normalises.

    Along heads each process has its own rows, and the gain's gradient is the sum over processes. Along features
    the input is gathered, because the mean runs over all of it.
    """

    def __init__(self, dim: int, *, along_features: bool = False) -> None:
        super().__init__()
        self.dim, self.along_features = dim, along_features

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        for name, parameter in list(module.named_parameters(recurse=False)):
            module.register_parameter(name, replicated(parameter, device_mesh))

        def enter(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            split = DTensor.from_local(inputs[0], device_mesh, [Shard(self.dim)], run_check=False)
            return (split.redistribute(placements=[Replicate()]) if self.along_features else split,)

        def leave(module: nn.Module, inputs: tuple[Tensor, ...], output: DTensor) -> Tensor:
            return output.redistribute(placements=[Shard(self.dim)]).to_local()

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
        return module
