"""Expert parallelism: every process has some of a block's experts, and tokens travel to those they chose.

All-to-all there and back, as many rows as the routing wants (dropless); experts are never gathered. What is left of
the data processes shards the experts that one process has (FSDP), as it shards everything else.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from siamesenorm.errors import ConfigError
from siamesenorm.layers.grouped import add_slots, grouped_linear, sort_slots, spread_slots
from siamesenorm.layers.mlp import activate
from siamesenorm.layers.moe import MoE, compute_dtype
from siamesenorm.train.tensor_layout import local


def experts_of(part: nn.Module) -> Iterator[MoE]:
    """All mixtures of experts in a part of a model."""
    return (module for module in part.modules() if isinstance(module, MoE))


def stacked(moe: MoE) -> dict[str, nn.Parameter]:
    """Parameters whose first dimension counts experts."""
    named = {name: getattr(moe, name) for name in ("w_in", "w_out", "b_in", "b_out")}
    return {name: parameter for name, parameter in named.items() if parameter is not None}


def check_experts_of(model: nn.Module, size: int) -> None:
    """Raise where a model's experts cannot be divided among so many processes."""
    counts = {moe.experts for moe in experts_of(model)}
    if not counts:
        raise ConfigError.not_allowed("parallel.ep", size, "1", when="for a model without experts")
    for count in counts:
        if count % size:
            raise ConfigError.refused("parallel.ep", size, f"model.moe.experts = {count} is no multiple")


def divide_experts(moe: MoE, mesh: DeviceMesh) -> None:
    """Keep this process's experts and let tokens travel; all other parameters stay as they are."""
    own = moe.experts // mesh.size()
    first = own * mesh.get_local_rank()
    for name, parameter in stacked(moe).items():
        mine = parameter.detach()[first : first + own].clone()
        part = DTensor.from_local(mine, mesh, [Shard(0)], run_check=False)
        setattr(moe, name, nn.Parameter(part, requires_grad=parameter.requires_grad))
    moe.run_experts = Exchange(mesh)


def share_statistics(moe: MoE, mesh: DeviceMesh) -> None:
    """Let the load-balancing loss count the slots of all parts of a batch."""
    moe.mean = SharedMean(mesh)


class SharedMean:
    """The mean of numbers over the processes of a mesh, of which idle ones add nothing."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group, self.size = mesh.get_group(), mesh.size()
        self.idle = False

    def __call__(self, values: Tensor) -> Tensor:
        """All processes call it."""
        values = torch.zeros_like(values) if self.idle else values.clone()
        dist.all_reduce(values, group=self.group)
        return values / self.size


@contextlib.contextmanager
def idle_part(model: nn.Module) -> Iterator[None]:
    """Inside, this process computes what does not count, because others wait for it: it adds no slots to theirs."""
    means = [moe.mean for moe in experts_of(model) if isinstance(moe.mean, SharedMean)]
    for mean in means:
        mean.idle = True
    try:
        yield
    finally:
        for mean in means:
            mean.idle = False


class Exchange:
    """`siamesenorm.layers.moe.run_experts` where every process of a mesh has an equal part of the experts."""

    def __init__(self, mesh: DeviceMesh) -> None:
        self.group, self.size = mesh.get_group(), mesh.size()

    def __call__(self, moe: MoE, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
        """Slots sorted by expert are sorted by process too: they leave as they lie, and come back so."""
        slots, order = sort_slots(chosen, moe.experts)
        rows = spread_slots(tokens.to(compute_dtype(tokens)), slots)
        leaving = slots.ends.diff(prepend=slots.ends.new_zeros(1))
        arriving = torch.empty_like(leaving)
        dist.all_to_all_single(arriving, leaving, group=self.group)
        own = moe.experts // self.size
        send, receive = (counts.view(self.size, own).sum(1).tolist() for counts in (leaving, arriving))
        expert = torch.arange(own, device=arriving.device).repeat(self.size).repeat_interleave(arriving)
        received = self.exchange(rows, send, receive)
        returned = self.exchange(self.compute(moe, received, expert, own), receive, send)
        weight = weights.flatten().index_select(0, order).unsqueeze(1)
        return add_slots((returned * weight).to(rows.dtype), slots)

    def exchange(self, rows: Tensor, send: list[int], receive: list[int]) -> Tensor:
        """So many rows to every process, so many from each."""
        return _AllToAll.apply(rows, send, receive, self.group)

    def compute(self, moe: MoE, rows: Tensor, expert: Tensor, own: int) -> Tensor:
        """What this process's experts make of rows, in the order of arrival.

        Gradients of its weights are those of the parts of a batch of all these processes, where other parameters have
        those of one part; the mean over all data processes, which is taken later, wants them divided by the number of
        processes. So the gradient is, from here to there.
        """
        slots, _ = sort_slots(expert.unsqueeze(1), own)
        rows = scaled_gradient(rows, self.size)
        inner = grouped_linear(
            rows, local(moe.w_in), moe.b_in if moe.b_in is None else local(moe.b_in), slots, dispatch=True
        )
        units = activate(inner, moe.activation)
        if moe.out_norm is not None:  # which every process has, for all experts
            units = scaled_gradient(moe.out_norm(scaled_gradient(units, 1 / self.size)), self.size)
        out = grouped_linear(
            units.to(inner.dtype),
            local(moe.w_out),
            moe.b_out if moe.b_out is None else local(moe.b_out),
            slots,
            dispatch=False,
        )
        return add_slots(scaled_gradient(out, 1 / self.size), slots)


class _AllToAll(torch.autograd.Function):
    """Rows travel, and their gradients travel back."""

    @staticmethod
    def forward(ctx: Any, rows: Tensor, send: list[int], receive: list[int], group: dist.ProcessGroup) -> Tensor:
        ctx.way = (receive, send, group)
        out = rows.new_empty(sum(receive), rows.shape[1])
        dist.all_to_all_single(out, rows.contiguous(), receive, send, group=group)
        return out

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None, None]:
        return _AllToAll.apply(grad, *ctx.way), None, None, None


class _ScaledGradient(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, factor: float) -> Tensor:
        ctx.factor = factor
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad * ctx.factor, None


def scaled_gradient(x: Tensor, factor: float) -> Tensor:
    """The same, whose gradient is times a factor."""
    return _ScaledGradient.apply(x, factor)
