"""Sequence parallelism: between sublayers, every process of a tensor group has the streams of some of the tokens.

Norms and links act on each position by itself, so that a process runs them, as they are, on its own tokens
(arXiv 2205.05198). All tokens are gathered in front of a sublayer; behind it, its parts are summed and scattered.
Streams are ordinary tensors; parameters that act on them are the same in all processes (DTensor, `Replicate`), and
each process has a part of their gradients (`Partial`), which are summed as they come.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor

from siamesenorm.errors import ConfigError
from siamesenorm.train.config import RunConfig

TOKENS = 1
"""Dimension of (batch, tokens, features) that is split."""


def divides_tokens(config: RunConfig, processes: int) -> bool:
    """Whether the tensor groups of a run, of so many processes each, divide its sequences; raises where they cannot."""
    wish, length = config.parallel.sequence_parallel, getattr(config.data, "sequence_length", None)
    if length is None or processes == 1:  # what has no sequence says so when it is split
        return bool(wish)
    if wish and length % processes:
        raise ConfigError(
            f"parallel.sequence_parallel: true is not allowed; data.sequence_length = {length} is no multiple of the "
            f"{processes} processes of a tensor group"
        )
    return length % processes == 0 if wish is None else wish


class TokenPlacement:
    """Where the tokens of a pass are: a part of them in each process of a tensor group, or all in every one.

    Without gradients, a pass whose tokens cannot be divided (an answer of one token) has all in every process.
    """

    def __init__(self, mesh: DeviceMesh, divide: bool) -> None:
        self.mesh, self.size, self.divide = mesh, mesh.size(), divide
        self.divided = divide

    def parts_of(self, count: int) -> int:
        """Into how many parts so many tokens are divided."""
        return self.size if self.divide and count % self.size == 0 else 1

    def begin(self, count: int) -> None:
        """A pass of so many tokens begins."""
        self.divided = self.parts_of(count) > 1
        if self.divide and not self.divided and torch.is_grad_enabled():
            raise ConfigError(
                f"parallel.sequence_parallel: true is not allowed for sequences of {count} tokens; "
                f"{self.size} processes of a tensor group take multiples of {self.size}"
            )

    @property
    def placements(self) -> list[Placement]:
        """Of streams and all that lies between sublayers."""
        return [Shard(TOKENS) if self.divided else Replicate()]

    def gather(self, x: Tensor) -> DTensor:
        """All tokens, of the part that this process has."""
        parts = DTensor.from_local(x, self.mesh, self.placements, run_check=False)
        return parts.redistribute(placements=[Replicate()])

    def whole(self, x: Tensor) -> Tensor:
        """The same as an ordinary tensor, whose gradient is the same in all processes."""
        return self.gather(x).to_local() if self.divided else x

    def own(self, x: Tensor, dim: int = TOKENS) -> Tensor:
        """The tokens that are this process's, of what all processes have alike; the gradients of all are gathered."""
        if not self.divided:
            return x
        alike = DTensor.from_local(x, self.mesh, [Replicate()], run_check=False)
        return alike.redistribute(placements=[Shard(dim)]).to_local()

    def scatter(self, x: DTensor) -> Tensor:
        """The tokens that are this process's, summed over processes where each has a part of a sum."""
        return x.redistribute(placements=self.placements).to_local()

    # Around modules ----------------------------------------------------------------------------------------

    def gather_for_sublayer(self, sublayer: nn.Module) -> None:
        """All tokens in front of a sublayer whose matrices are split, and that scatters its output by itself."""
        if self.divide:
            sublayer.register_forward_pre_hook(lambda _, inputs: (self.gather(inputs[0]), *inputs[1:]))

    def gather_for_experts(self, moe: nn.Module) -> None:
        """All tokens in front of experts, which every process has; each keeps its own tokens of the output."""
        if self.divide:
            moe.register_forward_pre_hook(lambda _, inputs: (self.whole(inputs[0]), *inputs[1:]))
            moe.register_forward_hook(lambda _, inputs, output: (self.own(output[0]), *output[1:]))


def replicated(parameter: nn.Parameter, mesh: DeviceMesh) -> nn.Parameter:
    """A parameter that all processes of a mesh have, of whose gradient each has a part."""
    copies = distribute_tensor(parameter.detach(), mesh, [Replicate()], src_data_rank=None)
    replica = nn.Parameter(copies, requires_grad=parameter.requires_grad)
    if replica.requires_grad:
        replica.register_hook(summed)
    return replica


def summed(grad: Tensor) -> Tensor:
    """A gradient that every process has a part of, summed; where weights are sharded too, FSDP does it."""
    if isinstance(grad, DTensor) and any(isinstance(p, Partial) for p in grad.placements):
        return grad.redistribute(placements=[Replicate()] * grad.device_mesh.ndim)
    return grad


def replicate_parameters(module: nn.Module, mesh: DeviceMesh) -> None:
    """Make all parameters inside `replicated`."""
    for inner in module.modules():
        for name, parameter in inner._parameters.items():
            if parameter is not None:
                inner._parameters[name] = replicated(parameter, mesh)


def on_own_tokens(function: Callable[..., Any], *modules: nn.Module) -> Callable[..., Any]:
    """A function of these modules, which sees their `replicated` parameters as the ordinary tensors they know."""
    inner = [m for module in modules for m in module.modules()]

    def call(*args: Any) -> Any:
        places = [(m._parameters, name) for m in inner for name, p in m._parameters.items() if p is not None]
        kept = [table[name] for table, name in places]
        if not all(isinstance(parameter, DTensor) for parameter in kept):  # gradients would be parts of sums
            raise ConfigError(
                "parallel.sequence_parallel: true is not allowed with weights from outside, as torch.func's "
                "functional_call gives them; it takes the model's own"
            )
        for (table, name), parameter in zip(places, kept, strict=True):
            table[name] = parameter.to_local(grad_placements=[Partial()])  # type: ignore[union-attr]
        try:
            return function(*args)
        finally:
            for (table, name), parameter in zip(places, kept, strict=True):
                table[name] = parameter

    return call
