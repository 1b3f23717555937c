"""What a model costs, before it is made: parameters, FLOPs and memory, counted on the meta device."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from siamesenorm.layers.mlp import GATED
from siamesenorm.models.stack import Block
from siamesenorm.residual import Norms, Residual
from siamesenorm.residual.kernels import native
from siamesenorm.residual.kernels.eager import planned_for

FLOAT32 = 4


@dataclass(frozen=True)
class Counts:
    """Costs of one model; bytes are those of float32 training. The unit of work is a token, or an image."""

    total: int
    """All parameters."""
    active: int
    """Parameters that one unit uses: all but the experts it is not sent to."""
    embedding: int
    """The embedding's parameters, and the head's where it is another."""
    topology: int
    """What the residual topology holds: norms on streams and inputs, gains, mixing weights."""
    topology_extra: int
    """How many more these are than Pre-Norm's."""
    flops_forward: float
    """Per unit, matrix products and attention (causal: over half of `length`), a product and a sum being two."""
    flops_training: float
    """Per unit, forward and backward."""
    length: int
    """Tokens of a sequence or an image, for attention's share."""
    weight_bytes: int
    """Weights alone."""
    optimizer_bytes: int
    """AdamW's two moments."""
    training_bytes: int
    """Weights, gradients and moments."""
    activation_bytes: int
    """Kept for backward per unit in eager mode, an estimate."""

    def as_json(self) -> dict[str, int | float]:
        """Plain numbers by name."""
        return asdict(self)


def counts_of(model: Any, *, flops: float, length: int, activations: int, idle: int = 0) -> Counts:
    """Counts of a model of any family, which may lie on the meta device; all but its stack counts as embedding.

    flops: of a unit's forward pass. activations: numbers kept of a unit. idle: parameters that a unit does not use.
    """
    residual = model.residual
    with torch.device("meta"):
        plain = Residual("pre", residual.dim, len(model.blocks), norm=residual.norms)
    total, topology = size(model), sum(p.numel() for p in model.residual_parameters().values())
    return Counts(
        total=total,
        active=total - idle,
        embedding=total - size(residual) - size(model.blocks),
        topology=topology,
        topology_extra=topology - size(plain),
        flops_forward=flops,
        flops_training=3 * flops,
        length=length,
        weight_bytes=FLOAT32 * total,
        optimizer_bytes=2 * FLOAT32 * total,
        training_bytes=4 * FLOAT32 * total,
        activation_bytes=FLOAT32 * activations,
    )


def flops_per_token(weights: int, *, blocks: int, width: int, seen: float) -> float:
    """Of a forward pass: two per weight, and attention's two products over the tokens that a token sees.

    width: of all heads of a block together.
    """
    return 2 * weights + 4 * blocks * width * seen


class Reader(nn.Linear):
    """A sublayer that keeps what it reads, and nothing else."""

    def forward(self, h: Tensor, context: None = None) -> Tensor:
        """A matrix product, as most sublayers begin with."""
        return super().forward(h)


def kept_by_links(topology: str, blocks: int, norms: Norms) -> float:
    """Tensors of the stack's width that autograd keeps outside of sublayers, their readings too, from end to end.

    Seen on a narrow stack of the same depth, so that it is true with the compiled kernels and without them.
    """
    width, tokens = 64, 8
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.enable_grad():
        narrow, reader = Residual(topology, width, blocks, norm=norms, needs="met"), Reader(width, width)
        links = list(narrow.links)
        pairs = [Block(reader, reader, links[first : first + 2], narrow) for first in range(0, len(links), 2)]

        def through(x: Tensor) -> Tensor:
            streams = narrow.open(x)
            for block in pairs:
                streams, _ = block(streams)
            return reader(narrow.close(streams))

        # The difference of two: what is kept of weights, however many tokens there are, goes.
        few, more = (saved_bytes(through, torch.randn(1, n * tokens, width, requires_grad=True)) for n in (1, 2))
    return (more - few) / (FLOAT32 * width * tokens)


def saved_bytes(function: Callable[[Tensor], Tensor], x: Tensor) -> int:
    """What autograd saves of a call, every storage once."""
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage  # held, so that no other takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        function(x)
    return sum(storage.nbytes() for storage in kept.values())


def kept_inside(block: Block, inputs: Callable[[int], tuple[Tensor, Any]]) -> float:
    """Numbers of one row that autograd keeps of a block's sublayers beside what they read, seen without values.

    inputs: a reading of so many rows, and what goes with it. The block lies on the meta device and is changed.
    """
    with planned_for("cpu", FakeTensor), FakeTensorMode(allow_non_fake_inputs=True), torch.enable_grad():
        block.to_empty(device="cpu")
        kept = 0.0
        for sublayer in (block.attend, block.feed):
            sizes = []
            for rows in (1, 2):  # the difference of two: what is kept of weights goes
                h, context = inputs(rows)
                sizes.append(saved_bytes(partial(sublayer, context=context), h.requires_grad_()))
            kept += (sizes[1] - sizes[0]) / FLOAT32 - h[:1].numel()
    return kept


def kept_per_token(*, blocks: int, dim: int, links: float, attention: int, ffn: int) -> int:
    """Numbers kept for backward: by the links (`kept_by_links`), and in every block of its sublayers' insides."""
    return int(links * dim) + blocks * (attention + ffn)


def kept_by_ffn(hidden: int, activation: str) -> int:
    """Numbers kept of its inside: what the activation took and gave; where its plain form runs, the gate's too."""
    if activation not in GATED:
        return 2 * hidden
    return (3 if activation == "swiglu" and native.enabled() else 4) * hidden


def size_of_sublayers(model: Any) -> int:
    """Parameters of attention and FFN in all blocks."""
    return sum(size(sublayer) for block in model.blocks for sublayer in block.sublayers)


def size(module: nn.Module) -> int:
    """All parameters of a module."""
    return sum(p.numel() for p in module.parameters())
