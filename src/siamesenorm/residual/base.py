"""The heart: a stack of sublayers, the links that join them to the residual stream(s), and one pass through it.

A model hands its sublayers to a `Topology` and never knows which one it has::

    streams = topology.open(embedding)
    for sublayer, link in zip(sublayers, topology.links):
        streams, h = link.read(streams)              # what the sublayer sees
        streams = link.write(streams, sublayer(h))   # what becomes of its output
    hidden = topology.close(streams)

`Topology.forward` and `Flow` run exactly this, and take the fused steps where a topology has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, NamedTuple, TypeAlias, get_args

import torch
from torch import Tensor, nn

from siamesenorm.residual.drop import Drop, Keep
from siamesenorm.residual.errors import TopologyError
from siamesenorm.residual.fused.recompute import remembering
from siamesenorm.residual.norms import NormLike, NormRole, Norms
from siamesenorm.residual.options import Options

SublayerKind = Literal["attention", "cross_attention", "ffn", "parallel"]
AttentionNorm = Literal["none", "qk_head", "qk_projection", "qkv_head"]
WeightRole = Literal["query", "key", "value", "attention_out", "ffn_in", "ffn_out"]
StreamKind = Literal["pre", "post", "mixed", "several"]
Streams: TypeAlias = Any  # a tensor, or a tuple of them: whatever the topology carries
Blocks: TypeAlias = int | Sequence[Sequence[str]]

ATTENTION_KINDS = ("attention", "cross_attention")


@dataclass(frozen=True)
class Place:
    """Where one sublayer stands in the stack."""

    index: int
    """0-based among all sublayers."""
    kind: str
    """attention, cross_attention, ffn or parallel (attention and FFN on the same input)."""
    block: int
    """l: 0-based block."""
    blocks: int
    """L: number of blocks."""
    position: int
    """0-based within its block."""
    size: int
    """Sublayers in its block."""
    total: int
    """Sublayers in the stack: 2L when every block has attention and FFN."""

    @property
    def is_attention(self) -> bool:
        """Whether queries, keys and values are read here."""
        return self.kind in ATTENTION_KINDS

    @property
    def ends_block(self) -> bool:
        """Whether this is its block's last sublayer."""
        return self.position == self.size - 1


def lay_out(blocks: Blocks) -> list[Place]:
    """Places of a stack: ``12`` for twelve (attention, ffn) blocks, or the sublayer kinds of every block."""
    whole = isinstance(blocks, int) and not isinstance(blocks, bool)
    listed = isinstance(blocks, Sequence) and not isinstance(blocks, str)
    if not whole and not (listed and all(isinstance(block, Sequence) for block in blocks)):  # type: ignore[union-attr]
        raise TopologyError(f"blocks: {blocks!r} is not allowed; it takes a number or a list of sublayer kinds a block")
    if isinstance(blocks, int):
        if blocks < 1:
            raise TopologyError(f"blocks: {blocks} is not allowed; a stack has at least 1 block")
        blocks = [("attention", "ffn")] * blocks
    known, kinds = get_args(SublayerKind), [tuple([b] if isinstance(b, str) else b) for b in blocks]
    if not kinds or not all(kinds):
        raise TopologyError("blocks: every stack needs at least 1 block and every block at least 1 sublayer")
    for kind in (kind for block in kinds for kind in block):
        if kind not in known:
            raise TopologyError(f"blocks: unknown sublayer kind {kind!r}; known kinds: {', '.join(known)}")
    total = sum(map(len, kinds))
    places: list[Place] = []
    for l, block in enumerate(kinds):
        for position, kind in enumerate(block):
            places.append(Place(len(places), kind, l, len(kinds), position, len(block), total))
    return places


@dataclass(frozen=True)
class SublayerNeeds:
    """The norms that a topology asks a sublayer to have inside."""

    attention_norm: AttentionNorm = "none"
    """On queries and keys (per head or over the whole projection) or on queries, keys and values; before RoPE."""
    output_norm: bool = False
    """A norm before the output projection of attention and FFN (Sub-LN)."""


class Gated(NamedTuple):
    """What a sublayer may return instead of a tensor: an output, and a gate (adaLN-Zero) that its update is times.

    The gate works where an update is dropped: on what is added to the stream(s), behind any norm of the update.
    """

    output: Tensor
    gate: Tensor


@dataclass(frozen=True)
class InitRule:
    """What a topology changes about weight initialisation; models multiply their own std by `scale[role]`."""

    scale: dict[WeightRole, float] = field(default_factory=dict)
    """Factor on the std of weights by role; 1 where a role is missing."""
    keeps_depth_factor: bool = True
    """Whether the initialiser's own depth factor on output projections stays (False: the rule replaces it)."""
    std: float | None = None
    """One std for all weights, where the topology's authors fix it."""

    @property
    def is_neutral(self) -> bool:
        """Whether it leaves the model's initialisation as it is."""
        return not self.scale and self.keeps_depth_factor and self.std is None


class Link(nn.Module):
    """Joins one sublayer to the stream(s); subclasses are a topology's equation for that sublayer."""

    drop: Drop | None

    def __init__(self) -> None:
        super().__init__()
        self.drop = None

    def read(self, streams: Streams) -> tuple[Streams, Tensor]:
        """The streams (changed where the equation changes them before the sublayer) and what the sublayer sees."""
        raise NotImplementedError

    def write(self, streams: Streams, output: Tensor, keep: Keep = None) -> Streams:
        """The streams after the sublayer's output has been added; `keep` is a draw of dropout made outside."""
        raise NotImplementedError

    @property
    def written_norm(self) -> nn.Module | None:
        """The norm that the stream comes out of when it is written, where `write` ends with one."""
        return None

    def draw(self, output: Tensor, gate: Tensor | None = None) -> Keep:
        """One draw of this link's dropout and stochastic depth, for all streams, times a gate if there is one."""
        keep = None if self.drop is None else self.drop.draw(output)
        return gate if keep is None else keep if gate is None else keep * gate

    def dropped(self, update: Tensor, keep: Keep = None) -> Tensor:
        """The update under a draw made outside, or else under this link's own."""
        keep = self.draw(update) if keep is None else keep
        return update if keep is None else update * keep


class Topology(nn.Module):
    """One residual topology over a whole stack: it owns the start, the links, the end and the init rule.

    Subclasses give the class attributes, `link`, and `open`/`close` where these differ from the defaults.
    Make one with `siamesenorm.Residual(name, dim, blocks, ...)`.
    """

    name: ClassVar[str]
    equation: ClassVar[str]
    end: ClassVar[str]
    arxiv: ClassVar[str]
    streams: ClassVar[str] = "1"
    kind: ClassVar[StreamKind]
    drawing: ClassVar[str]
    options_class: ClassVar[type[Options]] = Options
    has_final_norm: ClassVar[bool] = True

    def __init__(
        self,
        dim: int,
        blocks: Blocks,
        *,
        norm: NormLike | Norms = "rms",
        dropout: float = 0.0,
        drop_path: float | Sequence[float] = 0.0,
        fused: bool = True,
        part: bool = False,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(dim, int) or isinstance(dim, bool) or dim < 1:
            raise TopologyError(f"{self.name}: dim = {dim!r} is not allowed; it takes a whole number from 1")
        self.dim = dim
        self.places = lay_out(blocks)
        self.norms = Norms.of(norm)
        self.options = self.options_class.parse(options or {}, self.name)
        self.fused = fused
        self.setup()
        self.final_norm = self.norm("final") if self.has_final_norm else None
        # A part of a pair lends its links one by one and keeps none itself.
        self.links = nn.ModuleList() if part else nn.ModuleList(self.link(place) for place in self.places)
        self._set_drop(dropout, drop_path)

    # What a topology defines -------------------------------------------------------------------------

    def setup(self) -> None:
        """Checks options against the layout and makes what `link` shares; called before the links are made."""

    def link(self, place: Place) -> Link:
        """The link for one place of the stack."""
        raise NotImplementedError

    def open(self, x: Tensor) -> Streams:
        """The stream(s) at the start, from the embedding."""
        return x

    def close(self, streams: Streams) -> Tensor:
        """The stack's output, from the stream(s) at the end."""
        return streams if self.final_norm is None else self.final_norm(streams)

    def needs(self, place: Place) -> SublayerNeeds:
        """The norms that this topology wants inside the sublayer at `place`."""
        return SublayerNeeds()

    @property
    def init_rule(self) -> InitRule:
        """What this topology changes about weight initialisation."""
        return InitRule()

    def named_streams(self, streams: Streams) -> dict[str, Tensor]:
        """The stream(s) by name, each of the stack's width in its last dimension, for looking inside."""
        return {"x": streams}

    def output_norms(self, last: Link) -> list[nn.Module]:
        """The norms whose outputs, added up, are the stack's output; `last` is its last link."""
        norm = self.final_norm or last.written_norm
        return [] if norm is None else [norm]

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that must not be decayed, beyond the usual rule for vectors."""
        return set()

    # What every topology does --------------------------------------------------------------------------

    def norm(self, role: NormRole) -> nn.Module:
        """A fresh norm of the stack's width for a role."""
        return getattr(self.norms, role)(self.dim)

    def step(self, index: int, streams: Streams, output: Tensor, gate: Tensor | None = None) -> tuple[Streams, Tensor]:
        """`write` of sublayer `index` and `read` of the next, which a topology may run as one fused step."""
        return self.links[index + 1].read(self.write(index, streams, output, gate))  # type: ignore[operator]

    def write(self, index: int, streams: Streams, output: Tensor, gate: Tensor | None = None) -> Streams:
        """`write` of sublayer `index`, gated where there is a gate."""
        link: Any = self.links[index]
        return link.write(streams, output) if gate is None else link.write(streams, output, link.draw(output, gate))

    def forward(self, x: Tensor, sublayers: Iterable[Callable[..., Any]], *args: Any, **kwargs: Any) -> Tensor:
        """Run the whole stack: every sublayer is called as ``sublayer(h, *args, **kwargs)``."""
        flow = Flow(self, x)
        for sublayer in sublayers:
            flow.through(sublayer, *args, **kwargs)
        return flow.close()

    def start(self, x: Tensor) -> Flow:
        """Begin a pass: a `Flow` that sublayers are sent through one by one."""
        return Flow(self, x)

    def reset_parameters(self) -> None:
        """Initial values for every parameter of the topology, as after construction on `meta`."""
        for module in self.modules():
            reset = getattr(module, "reset_parameters", None)
            if module is not self and callable(reset):
                reset()

    def check_input(self, x: Tensor) -> None:
        """Raise if `x` cannot be this stack's embedding."""
        if not isinstance(x, Tensor) or x.dim() < 1 or x.shape[-1] != self.dim or not x.is_floating_point():
            got = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise TopologyError(
                f"{self.name}: the embedding must be a floating-point tensor with last dimension {self.dim}, got {got}"
            )

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"{self.name}, dim={self.dim}, sublayers={len(self.places)}, {self.options}"

    def _set_drop(self, dropout: float, drop_path: float | Sequence[float]) -> None:
        blocks = self.places[0].blocks
        many = isinstance(drop_path, Sequence) and not isinstance(drop_path, str)
        rates: list[Any] = list(drop_path) if many else [drop_path] * blocks  # type: ignore[arg-type]
        if len(rates) != blocks:
            raise TopologyError(f"drop_path: {len(rates)} rates for {blocks} blocks; give one rate or one a block")
        for place, link in zip(self.places, self.links, strict=False):
            if dropout or rates[place.block]:
                link.drop = Drop(dropout, rates[place.block])


class Flow:
    """One forward pass through a topology: holds the streams while a model sends its sublayers through.

    ::

        flow = residual.start(x)
        for block in self.blocks:
            flow.through(block.attention, mask)
            flow.through(block.ffn)
        x = flow.close()

    `through` is ``h = flow.read()``, the sublayer, ``flow.write(output)``; either may be called by hand.
    `at` and `streams` restart a pass in the middle of the stack, as pipelines and checkpointed blocks do.
    """

    def __init__(self, topology: Topology, x: Tensor | None = None, *, streams: Streams = None, at: int = 0) -> None:
        self.topology, self.index = topology, at
        if not 0 <= at <= len(topology.links):
            raise TopologyError(f"{topology.name}: at = {at} is not allowed; it takes 0 to {len(topology.links)}")
        if (x is None) == (streams is None):
            raise TopologyError(f"{topology.name}: a pass starts from an embedding or from streams, one of the two")
        if x is not None:
            topology.check_input(x)
            streams = topology.open(x)
        self._streams = streams
        # An output not yet written, and its gate, so that write and read can be one step.
        self._pending: tuple[Tensor, Tensor | None] | None = None
        self._read: torch.Size | None = None

    def read(self) -> Tensor:
        """What the next sublayer sees."""
        if self.index >= len(self.topology.links):
            raise TopologyError(
                f"{self.topology.name}: the stack has {len(self.topology.links)} sublayers, one more was run"
            )
        if self._read is not None:
            raise TopologyError(f"{self.topology.name}: sublayer {self.index} was read but not written")
        if self._pending is None:
            self._streams, h = self.topology.links[self.index].read(self._streams)  # type: ignore[operator]
        else:
            self._streams, h = self.topology.step(self.index - 1, self._streams, *self._pending)
            self._pending = None
        self._read = h.shape
        return h

    def write(self, output: Tensor, gate: Tensor | None = None) -> None:
        """Take the output of the sublayer that was read last, and a gate that its update is multiplied by."""
        if self._read is None:
            raise TopologyError(f"{self.topology.name}: sublayer {self.index} was written before it was read")
        shape = output.shape if isinstance(output, Tensor) else type(output).__name__
        if shape != self._read:
            raise TopologyError(
                f"{self.topology.name}: sublayer {self.index} must return one tensor of shape {tuple(self._read)}, "
                f"got {shape if isinstance(shape, str) else tuple(shape)}"
            )
        self._pending, self._read = (output, gate), None
        self.index += 1

    def through(self, sublayer: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
        """Read, call ``sublayer(h, *args, **kwargs)``, write its output and return what it returned.

        A sublayer may return a tuple (attention weights, a cache); its output is the first element. It may also
        return `Gated`.
        """
        h = self.read()
        with remembering(h):
            result = sublayer(h, *args, **kwargs)
        if isinstance(result, Gated):
            self.write(*result)
        else:
            self.write(result[0] if isinstance(result, tuple) and result else result)
        return result

    @property
    def streams(self) -> Streams:
        """The streams after the last write; between sublayers, never between a read and its write."""
        if self._read is not None:
            raise TopologyError(f"{self.topology.name}: sublayer {self.index} was read but not written")
        if self._pending is not None:
            self._streams = self.topology.write(self.index - 1, self._streams, *self._pending)
            self._pending = None
        return self._streams

    def close(self) -> Tensor:
        """The stack's output; every sublayer must have been run."""
        if self.index != len(self.topology.links):
            raise TopologyError(
                f"{self.topology.name}: the stack has {len(self.topology.links)} sublayers, {self.index} were run"
            )
        return self.topology.close(self.streams)
