"""Embedding, head and loss where the processes of a tensor group divide the vocabulary among themselves.

Every process has the logits of its own tokens only; what a row's cross-entropy needs of the others, its largest
logit, its sum and the label's logit, are three numbers per row. Whoever asks for logits gets all of them, gathered.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

from siamesenorm.errors import ConfigError
from siamesenorm.layers.cross_entropy import linear_cross_entropy
from siamesenorm.layers.linear import linear
from siamesenorm.models.lm import LanguageModel
from siamesenorm.train.parallel.sequence import TokenPlacement
from siamesenorm.train.tensor_layout import local


class Vocabulary:
    """What a process has of a vocabulary: rows of embedding and head."""

    def __init__(self, mesh: DeviceMesh, size: int) -> None:
        self.mesh, self.group = mesh, mesh.get_group()
        self.first = -(-size // mesh.size()) * mesh.get_local_rank()
        """As DTensor divides rows: all parts but the last are of one size."""

    def max_(self, values: Tensor) -> Tensor:
        """The largest of all processes, in place."""
        dist.all_reduce(values, dist.ReduceOp.MAX, self.group)
        return values

    def sum_(self, values: Tensor) -> Tensor:
        """The sum over all processes, in place."""
        dist.all_reduce(values, group=self.group)
        return values

    def shared(self, hidden: Tensor) -> Tensor:
        """What all processes have alike and each uses for its own part; gradients are summed over all."""
        alike = DTensor.from_local(hidden, self.mesh, [Replicate()], run_check=False)
        return alike.to_local(grad_placements=[Partial()])

    def cross_entropy(self, hidden: Tensor, weight: Tensor, labels: Tensor, *, z_weight: float = 0.0) -> Tensor:
        """`linear_cross_entropy` of the whole vocabulary, the same in all processes."""
        return linear_cross_entropy(self.shared(hidden), local(weight), labels, z_weight=z_weight, part=self)

    def project(self, hidden: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        """Logits of the whole vocabulary."""
        assert bias is None  # heads have none
        logits = linear(self.shared(hidden), local(weight))
        shape = torch.Size((*logits.shape[:-1], weight.shape[0]))
        parts = DTensor.from_local(
            logits, self.mesh, [Shard(logits.dim() - 1)], run_check=False, shape=shape, stride=contiguous(shape)
        )
        return parts.redistribute(placements=[Replicate()]).to_local()

    def split(self, weight: nn.Parameter) -> nn.Parameter:
        """Rows of a matrix, this process's own."""
        return nn.Parameter(
            distribute_tensor(weight.detach(), self.mesh, [Shard(0)]), requires_grad=weight.requires_grad
        )

    def embed(self, ids: Tensor, weight: Tensor, tokens: TokenPlacement) -> Tensor:
        """Rows of the whole vocabulary, of all tokens or of those that are this process's."""
        rows, own_ids = local(weight), ids - self.first
        own = (own_ids >= 0) & (own_ids < rows.shape[0])
        part = F.embedding(own_ids.where(own, 0), rows).masked_fill(~own.unsqueeze(-1), 0)
        return tokens.scatter(DTensor.from_local(part, self.mesh, [Partial()], run_check=False))

    def take(self, model: LanguageModel, tokens: TokenPlacement) -> None:
        """Let a model's embedding, head and loss be this one's."""
        table: Any = model.embedding
        table.forward = lambda ids: self.embed(ids, table.weight, tokens)
        model.project, model.cross_entropy = self.project, self.cross_entropy
        if model.head is not None:
            model.head.product = self.project


def contiguous(shape: torch.Size) -> tuple[int, ...]:
    """Strides of a tensor that lies in order."""
    return torch.empty(shape, device="meta").stride()


def divides_vocabulary(wish: bool | None, size: int, processes: int) -> bool:
    """Whether so many processes divide a vocabulary, where nothing is said against it; raises where they cannot."""
    empty = -(-size // processes) * (processes - 1) >= size
    if wish and empty:
        raise ConfigError(
            f"parallel.loss_parallel: true is not allowed; model.vocab_size = {size} leaves one of the {processes} "
            f"processes of a tensor group without a token"
        )
    return wish is not False and not empty
