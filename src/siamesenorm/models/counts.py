"""What a model costs, before it is made: parameters, FLOPs and memory, counted on the meta device."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, fields
from functools import cached_property, lru_cache, partial, wraps
from typing import Any, ParamSpec, cast

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode

from siamesenorm.models.stack import Block, Stack
from siamesenorm.residual import Gated, Norms, Residual
from siamesenorm.residual.kernels import native
from siamesenorm.residual.kernels.eager import planned_for

P = ParamSpec("P")
FLOAT32 = 4
KEPT = 32
"""Configurations whose counts are kept."""
NARROW = 64
"""Width of the stacks on which it is seen what links keep."""


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
    activations: Callable[[], float] = field(repr=False, compare=False)
    """Counts the numbers kept for backward per unit; it takes longer than all else here together."""

    @cached_property
    def activation_bytes(self) -> int:
        """Kept for backward per unit in eager mode, an estimate."""
        return FLOAT32 * int(self.activations())

    def as_json(self, *, activations: bool = True) -> dict[str, int | float]:
        """Plain numbers by name; activations: whether those are counted too."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.name != "activations"}
        return {**plain, "activation_bytes": self.activation_bytes} if activations else plain


def counted_once(count: Callable[P, Counts]) -> Callable[P, Counts]:
    """Keep what was counted of the last configurations, with the compiled kernels and without them apart."""

    @lru_cache(KEPT)
    def kept(kernels: bool, *args: P.args, **options: P.kwargs) -> Counts:
        return count(*args, **options)

    @wraps(count)
    def counted(*args: P.args, **options: P.kwargs) -> Counts:
        return kept(native.allowed() and native.library() is not None, *args, **options)  # type: ignore[arg-type]

    return counted


def counts_of(model: Any, *, flops: float, length: int, activations: Callable[[], float], idle: int = 0) -> Counts:
    """Counts of a model of any family, which may lie on the meta device; all but its stack counts as embedding.

    flops: of a unit's forward pass. activations: counts numbers kept of a unit. idle: parameters it does not use.
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
        activations=activations,
    )


def flops_per_token(weights: int, *, blocks: int, width: int, seen: float) -> float:
    """Of a forward pass: two per weight, and attention's two products over the tokens that a token sees.

    width: of all heads of a block together.
    """
    return 2 * weights + 4 * blocks * width * seen


class Reader(nn.Linear):
    """A sublayer that keeps what it reads, and nothing else; its update is gated where there is a gate."""

    gate: Tensor | None = None

    def forward(self, h: Tensor, context: None = None) -> Any:
        """A matrix product, as most sublayers begin with."""
        product = super().forward(h)
        return product if self.gate is None else Gated(product, self.gate)


def kept_by_links(topology: str, blocks: int, norms: Norms, dim: int, *, gated: bool = False) -> float:
    """Numbers of a token that autograd keeps outside of sublayers, their readings too, from end to end of a stack.

    Seen on narrow stacks of the same depth, so that it is true with the compiled kernels and without them; from one
    width to another it grows evenly. gated: whether a condition gates every update.
    """
    kept = partial(kept_by_narrow_links, topology, blocks, norms, gated=gated)
    narrow = kept(NARROW)
    return narrow if dim == NARROW else narrow + (dim - NARROW) * (kept(2 * NARROW) - narrow) / NARROW


def kept_by_narrow_links(topology: str, blocks: int, norms: Norms, width: int, *, gated: bool) -> float:
    """The same of a stack that is made."""
    tokens = 8
    with torch.device("cpu"), torch.random.fork_rng(devices=[]), torch.enable_grad():
        narrow, reader = Residual(topology, width, blocks, norm=norms, needs="met"), Reader(width, width)
        links = list(narrow.links)
        pairs = [Block(reader, reader, links[first : first + 2], narrow) for first in range(0, len(links), 2)]
        reader.gate = torch.ones(1, 1, width, requires_grad=True) if gated else None

        def through(x: Tensor) -> object:
            streams = narrow.open(x)
            for block in pairs:
                streams, _ = block(streams)
            return reader(narrow.close(streams))

        # The difference of two: what is kept of weights, however many tokens there are, goes.
        few, more = (saved_bytes(through, torch.randn(1, n * tokens, width, requires_grad=True)) for n in (1, 2))
    return (more - few) / (FLOAT32 * tokens)


def saved_bytes(function: Callable[[Tensor], object], x: Tensor) -> int:
    """What autograd saves of a call, every storage once."""
    kept: dict[int, torch.UntypedStorage] = {}

    def note(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage  # held, so that no other takes its place
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        function(x)
    return sum(storage.nbytes() for storage in kept.values())


def kept_in_sublayers(model: Stack[Any], inputs: Callable[[Block, int], tuple[Tensor, Any]]) -> float:
    """Numbers of one row that autograd keeps inside of all sublayers; of every kind of block one is looked at.

    inputs: a reading of so many rows for a block, and what goes with it. The model lies on the meta device; some of
    its blocks are changed.
    """
    kinds: dict[str, float] = {}
    total = 0.0
    for block in cast(Iterable[Block], model.blocks):
        kind = f"{block.attention}{block.ffn}"
        if kind not in kinds:
            kinds[kind] = kept_inside(block, partial(inputs, block))
        total += kinds[kind]
    return total


def kept_inside(block: Block, inputs: Callable[[int], tuple[Tensor, Any]]) -> float:
    """Numbers of one row that autograd keeps of a block's sublayers beside what they read, seen without values."""
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


def size_of_sublayers(model: Any) -> int:
    """Parameters of attention and FFN in all blocks."""
    return sum(size(sublayer) for block in model.blocks for sublayer in block.sublayers)


def size(module: nn.Module) -> int:
    """All parameters of a module."""
    return sum(p.numel() for p in module.parameters())
