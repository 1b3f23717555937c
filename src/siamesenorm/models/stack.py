"""What every model is built on: blocks that are pure functions of the residual streams, and the ways to run them.

A block holds attention, FFN and the two links that join them to the stream(s): streams in, streams out. So it can be
sharded (``fully_shard(block)``), compiled (`Stack.compile_blocks`), checkpointed (`Stack.run`) or put on another
machine by itself. What the models say themselves is which sublayers they have, how streams begin and end, and how
their weights start.
"""

from __future__ import annotations

import re
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from functools import wraps
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from siamesenorm.models.init import FirstWeights, PartContext
from siamesenorm.models.parametrization import base_depth, width_ratio
from siamesenorm.models.sharded_init import whole_parts
from siamesenorm.residual import Norms, NormSpec, Place, Residual, Topology
from siamesenorm.residual.flow import Streams, output_of
from siamesenorm.residual.hooks import BACKWARD, FORWARD, everywhere, has_hooks
from siamesenorm.residual.ramp import ramps_of

Context = Any
"""What all blocks of one pass share: angles and masks, a condition, or nothing."""


class BlockReport(NamedTuple):
    """What stands behind a block's streams in what hooks on the block see of its output."""

    layout: Any
    """How the streams, a flat tuple of tensors there, are nested."""
    reported: tuple[Any, ...]
    """What the FFN returned beside its output."""


SublayerCall = Callable[[Tensor, Context], Any]
SublayerRunner = Callable[[SublayerCall, Tensor, Context], Any]


def run_sublayer(sublayer: SublayerCall, h: Tensor, context: Context) -> Any:
    """The plain way to run a sublayer; activation checkpointing is another."""
    return sublayer(h, context)


class Block(nn.Module):
    """Attention and FFN with their links: ``streams, reported = block(streams, context)``.

    What an FFN returns beside its output (an MoE's statistics) is reported. Hooks on a block see the streams as plain
    tensors, however the topology nests them: ``hook(block, tensors, (*tensors, behind))``.
    """

    def __init__(self, attention: nn.Module, ffn: nn.Module, links: Iterable[nn.Module], topology: Topology) -> None:
        super().__init__()
        self.attention, self.ffn, self.links = attention, ffn, nn.ModuleList(links)
        self.before, self.between = topology.step(None, self.links[0]), topology.step(*self.links)  # type: ignore[arg-type]
        self.run_sublayer: SublayerRunner = run_sublayer
        self._compiled: Callable[..., Any] | None = None
        self._hooks_then: list[tuple[int, ...]] = []

    @property
    def sublayers(self) -> tuple[Any, Any]:
        """Attention and FFN."""
        return self.attention, self.ffn

    def attend(self, h: Tensor, context: Context) -> Any:
        """What attention makes of its reading."""
        return self.attention(h, context)

    def feed(self, h: Tensor, context: Context) -> Any:
        """What the FFN makes of its reading."""
        return self.ffn(h)

    def __call__(self, streams: Streams, context: Context = None) -> tuple[Streams, tuple[Any, ...]]:
        """The streams behind the block, and what its FFN reports."""
        if not has_hooks(self):
            return self.run(streams, context)
        tensors, layout = pytree.tree_flatten(streams)
        *tensors, behind = super().__call__(*tensors, layout=layout, context=context)
        return pytree.tree_unflatten(tensors, behind.layout), behind.reported

    def forward(self, *streams: Tensor, layout: Any, context: Context = None) -> tuple[Tensor | BlockReport, ...]:
        """The call as hooks see it."""
        carried, reported = self.run(pytree.tree_unflatten(streams, layout), context)
        tensors, layout = pytree.tree_flatten(carried)
        return *tensors, BlockReport(layout, reported)

    def run(self, streams: Streams, context: Context) -> tuple[Streams, tuple[Any, ...]]:
        """The call inside of hooks: compiled where it is and nothing else than then is asked for."""
        if self._compiled is not None and self._hooks_then == self._hooks(FORWARD) and not any(self._hooks(BACKWARD)):
            return self._compiled(streams, context)
        return self.pure(streams, context)

    def pure(self, streams: Streams, context: Context) -> tuple[Streams, tuple[Any, ...]]:
        """The function itself, as it is compiled."""
        streams, h = self.before(streams)
        streams, h = self.between(streams, *output_of(self.run_sublayer(self.attend, h, context)))
        result = self.run_sublayer(self.feed, h, context)
        streams = self.links[-1].add(streams, *output_of(result))  # type: ignore[operator]
        return streams, result[1:] if type(result) is tuple else ()

    def compile(self, *args: Any, **kwargs: Any) -> None:
        """Compile the function as one graph; hooks on the block itself run outside of it.

        Forward hooks on modules inside are compiled with them. While others than now hang there, or backward hooks,
        the block runs eagerly.
        """
        compiled = torch.compile(self.pure, *args, **{"fullgraph": True, **kwargs})
        self._compiled = compiled if kwargs.get("backend", "inductor") == "inductor" else closing_autocast(compiled)
        self._hooks_then = self._hooks(FORWARD)

    def _hooks(self, kinds: Sequence[str]) -> list[tuple[int, ...]]:
        """The hooks that hang on all modules there are, and on each module inside: their ids, which come but once."""
        modules = (m for child in self.children() for m in child.modules())
        return [tuple(hooks) for hooks in (*everywhere(kinds), *(vars(m)[kind] for m in modules for kind in kinds))]

    def __getstate__(self) -> dict[str, Any]:
        """A copy is not compiled yet."""
        return {**super().__getstate__(), "_compiled": None}


def closing_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """A function behind which autocast is nested no deeper than before it, also where an exception ends it.

    Checkpointing ends recomputation by an exception, and a graph that runs as dynamo wrote it (``backend="eager"``)
    enters and leaves regions of autocast by plain calls: one left open keeps the casts of weights for ever.
    """

    def nesting() -> int:
        torch.autocast_increment_nesting()
        return torch.autocast_decrement_nesting()

    @wraps(function)
    def closed(*args: Any) -> Any:
        outer = nesting()
        try:
            return function(*args)
        finally:
            while nesting() > outer:
                if torch.autocast_decrement_nesting() == 0:
                    torch.clear_autocast_cache()

    return closed


Runner = Callable[[Block, Streams, Context], tuple[Streams, tuple[Any, ...]]]


def run_block(block: Block, streams: Streams, context: Context) -> tuple[Streams, tuple[Any, ...]]:
    """The plain way to run a block; activation checkpointing is another."""
    return block(streams, context)


Config = TypeVar("Config")


class Stack(nn.Module, ABC, Generic[Config]):
    """A model whose `residual` carries its `blocks`; language, vision and diffusion models subclass it.

    Made under ``torch.device("meta")`` it costs nothing; ``to_empty`` and `init_weights` then allocate and fill it.
    """

    block_class: ClassVar[type[Block]] = Block
    first_weights: ClassVar[type[FirstWeights]]
    residual: Topology
    blocks: nn.ModuleList

    def __init__(self, config: Config, *, seed: int | None = None, fused: bool = True) -> None:
        super().__init__()
        self.config = config
        self.run: Runner = run_block
        self.register_load_state_dict_pre_hook(_rename_links)
        device = torch.get_default_device()
        with torch.device("meta"):  # modules would draw first weights of their own here, to be thrown away
            self.build(fused)
        if device.type != "meta":
            self.to_empty(device=device)
            self.init_weights(seed)

    @abstractmethod
    def build(self, fused: bool) -> None:
        """Make all modules: what lies before the blocks, the blocks by `make_blocks`, and what lies behind them."""

    @abstractmethod
    def make_attention(self, place: Place) -> nn.Module:
        """The attention of a place in the stack."""

    @abstractmethod
    def make_ffn(self, place: Place) -> nn.Module:
        """The FFN of a place in the stack."""

    def make_blocks(self, norm: NormSpec | Norms, fused: bool, drop_path: Sequence[float] = ()) -> None:
        """Build the configuration's topology and the blocks on it, to which it hands its links over."""
        c: Any = self.config
        topology = Residual(
            c.topology,
            c.dim,
            c.blocks,
            norm=norm,
            dropout=c.dropout,
            drop_path=drop_path or 0.0,
            base_blocks=base_depth(c),
            fused=fused,
            needs="met",
        )
        links, places = list(topology.links), topology.places
        del topology.links
        topology.links = links  # type: ignore[assignment]  # a plain list: the blocks own them now
        self.residual = topology
        self.blocks = nn.ModuleList(
            self.block_class(self.make_attention(first), self.make_ffn(second), links[k : k + 2], topology)
            for k, first, second in zip(range(0, len(places), 2), places[::2], places[1::2], strict=True)
        )
        sublayers = [part for block in self.blocks for name, part in block.named_children() if name != "links"]
        topology.lent = [ramp for sublayer in sublayers for ramp in ramps_of(sublayer)]

    def init_weights(self, seed: int | None = None, part_context: PartContext = nullcontext) -> None:
        """First values for every parameter, the same for the same seed; see `siamesenorm.models.init`.

        Parameters may be sharded (`fully_shard`) and get the values of the unsharded model. A `part_context`
        allocates the memory of each part by itself; without it, ``to_empty`` comes before.
        """
        self.first_weights(self, seed, whole_parts(self, seed) if part_context is nullcontext else part_context).fill()

    def through(self, x: Tensor, context: Context = None) -> tuple[Tensor, list[Any]]:
        """The stack's output for an embedding, and what its blocks reported."""
        self.residual.check_input(x)
        self.residual.check_step()
        streams = self.residual.open(x)
        reported: list[Any] = []
        for block in self.blocks:
            streams, more = self.run(block, streams, context)  # type: ignore[arg-type]  # ModuleList holds blocks
            reported.extend(more)
        return self.residual.close(streams), reported

    def for_head(self, hidden: Tensor) -> Tensor:
        """The stack's output as the head reads it: smaller where the model is wider than its base."""
        wide = width_ratio(self.config)  # type: ignore[arg-type]  # every configuration of a stack has a size
        return hidden if wide == 1 else hidden / wide

    def residual_parameters(self) -> dict[str, nn.Parameter]:
        """What belongs to the topology, by name: how streams begin and end, and the blocks' links."""
        return {
            name: parameter
            for name, parameter in self.named_parameters()
            if name.startswith("residual.") or name.split(".")[2:3] == ["links"]
        }

    def compile_blocks(self, **options: Any) -> None:
        """Compile each block by itself (`torch.compile` takes the options); blocks of one shape share one graph.

        Do it before the model is sharded or wrapped; the time it takes does not grow with the depth, but where streams
        do: then blocks, or groups of them, differ in shape.
        """
        limits = torch._dynamo.config  # all blocks are one function to the compiler, of as many shapes as there are
        limits.recompile_limit = max(limits.recompile_limit, len(self.blocks) + 8)
        for block in self.blocks:
            block.compile(**options)


def current_name(name: str) -> str:
    """A tensor's name as it is now: before version 0.3, a block's links were named after their number in the stack."""
    return re.sub(r"\bresidual\.links\.(\d{1,9})\.", _link_of_block, name)


def _link_of_block(match: re.Match[str]) -> str:
    block, position = divmod(int(match[1]), 2)
    return f"blocks.{block}.links.{position}."


def _rename_links(module: nn.Module, state: dict[str, Any], prefix: str, *rest: Any) -> None:
    """Take weights under their old names too."""
    for name in [name for name in state if name.startswith(f"{prefix}residual.links.")]:
        state[current_name(name)] = state.pop(name)
