"""Tensor parallelism of any model: each process has some heads and some columns of the FFN.

The streams are the same in every process of a group, so that topologies, their fused steps and the head run as
they are. A sublayer's first matrix is split by rows and its last by columns; the outputs are summed once a sublayer
(arXiv 1909.08053).
"""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, ParallelStyle, RowwiseParallel, parallelize_module

from siamesenorm.errors import ConfigError
from siamesenorm.layers.attention import Attention
from siamesenorm.layers.mlp import GATED, MLP
from siamesenorm.models.stack import Block
from siamesenorm.residual.ramp import ramps_of
from siamesenorm.train.layout import ROW_ORDER

HEADS = FEATURES = 2
"""Dimension of (batch, tokens, heads, head_dim) and of (batch, tokens, features) that is split."""


def split_sublayers(block: Block, mesh: DeviceMesh) -> None:
    """Split a block's attention and FFN over the processes of a mesh; experts stay whole, as embedding and head do."""
    if mesh.size() == 1:
        return
    if isinstance(block.attention, Attention):
        split_attention(block.attention, mesh)
    if isinstance(block.ffn, MLP):
        split_ffn(block.ffn, mesh)


def split_attention(attention: Attention, mesh: DeviceMesh) -> None:
    """Equal numbers of heads of q, k and v to every process."""
    refuse_growing(attention)
    size, width = mesh.size(), attention.head_dim
    for name, heads in (("heads", attention.heads), ("kv_heads", attention.kv_heads)):
        if heads % size:
            raise ConfigError(f"parallel.group: {size} is not allowed for tp; model.{name} = {heads} is no multiple")
    sizes = [attention.heads * width, attention.kv_heads * width, attention.kv_heads * width]
    reorder(attention.qkv, together(sizes, size))
    attention.heads, attention.kv_heads = attention.heads // size, attention.kv_heads // size
    plan: dict[str, ParallelStyle] = {"qkv": ColwiseParallel(), "out": SummedRows()}
    whole_projection = attention.norm_kind == "qk_projection"
    for name in ("q_norm", "k_norm", "v_norm"):
        if getattr(attention, name) is not None:
            plan[name] = SplitNorm(HEADS, along_features=whole_projection)
    if attention.out_norm is not None:
        plan["out_norm"] = SplitNorm(FEATURES, along_features=True)
    parallelize_module(attention, mesh, plan)


def split_ffn(ffn: MLP, mesh: DeviceMesh) -> None:
    """Equal parts of the hidden width to every process."""
    refuse_growing(ffn)
    size, hidden = mesh.size(), ffn.down.in_features
    if hidden % size:
        raise ConfigError(f"parallel.group: {size} is not allowed for tp; model.ffn_dim = {hidden} is no multiple")
    if ffn.activation in GATED:
        reorder(ffn.up, together([hidden, hidden], size))
    plan: dict[str, ParallelStyle] = {"up": ColwiseParallel(), "down": SummedRows()}
    if ffn.out_norm is not None:
        plan["out_norm"] = SplitNorm(FEATURES, along_features=True)
    parallelize_module(ffn, mesh, plan)


def refuse_growing(sublayer: nn.Module) -> None:
    """Raise where norms inside grow in: there is no split form of them."""
    if ramps_of(sublayer):
        raise ConfigError("parallel.mode: 'tp' is not allowed while norms inside sublayers grow in (blend); take fsdp")


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

    def __init__(self) -> None:
        super().__init__(output_layouts=Partial(), use_local_output=False)

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        module = super()._apply(module, device_mesh)
        module.register_forward_hook(lambda _, inputs, out: out.redistribute(placements=[Replicate()]).to_local())
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
            copies = nn.Parameter(distribute_tensor(parameter.detach(), device_mesh, [Replicate()]))
            copies.register_hook(_summed)
            module.register_parameter(name, copies)

        def enter(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
            split = DTensor.from_local(inputs[0], device_mesh, [Shard(self.dim)], run_check=False)
            return (split.redistribute(placements=[Replicate()]) if self.along_features else split,)

        def leave(module: nn.Module, inputs: tuple[Tensor, ...], output: DTensor) -> Tensor:
            return output.redistribute(placements=[Shard(self.dim)]).to_local()

        module.register_forward_pre_hook(enter)
        module.register_forward_hook(leave)
        return module


def _summed(grad: Tensor) -> Tensor:
    """A gradient that every process has a part of, summed."""
    if isinstance(grad, DTensor) and any(isinstance(p, Partial) for p in grad.placements):
        return grad.redistribute(placements=[Replicate()] * grad.device_mesh.ndim)
    return grad
