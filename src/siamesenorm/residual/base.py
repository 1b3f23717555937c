"""The heart: what a topology is, and the links that join sublayers to the residual stream(s).

A model hands its sublayers to a `Topology` and never knows which one it has::

    streams = topology.open(embedding)
    for sublayer, link in zip(sublayers, topology.links):
        streams, h = link.read(streams)              # what the sublayer sees
        streams = link.write(streams, sublayer(h))   # what becomes of its output
    hidden = topology.close(streams)

`Topology.forward` and `Flow` run exactly this. Between two sublayers of one call, `write` and the next `read` are one
`Step`, which a topology may run as one fused operator.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, ClassVar, Literal

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from siamesenorm.errors import TopologyError
from siamesenorm.residual.depth import depth_factor
from siamesenorm.residual.drop import Drop, Keep
from siamesenorm.residual.flow import Flow, Streams, check_returned, output_of
from siamesenorm.residual.needs import NeedsOnOffer, NeedsState, warn
from siamesenorm.residual.norms import NormFactory, NormLike, NormRole, Norms
from siamesenorm.residual.options import Options
from siamesenorm.residual.places import Blocks, Place, lay_out
from siamesenorm.residual.ramp import Growing, Ramp, Share, ramps_of
from siamesenorm.residual.summands import Sum, mean_gain

AttentionNorm = Literal["none", "qk_head", "qk_projection", "qkv_head"]
WeightRole = Literal["query", "key", "value", "attention_out", "ffn_in", "ffn_out"]
StreamKind = Literal["pre", "post", "mixed", "several"]


@dataclass(frozen=True)
class Growth:
    """Norms inside sublayers that grow in over training."""

    names: tuple[str, ...]
    """Of q, k, v and out."""
    start: int
    """The step behind which they begin to."""
    steps: int


@dataclass(frozen=True)
class SublayerNeeds:
    """The norms that a topology asks a sublayer to have inside."""

    attention_norm: AttentionNorm = "none"
    """On queries and keys (per head or over the whole projection) or on queries, keys and values; before RoPE."""
    output_norm: bool = False
    """A norm before the output projection of attention and FFN (Sub-LN)."""
    growing: Growth | None = None
    """Which of these norms grow in over training, and when (`blend`)."""

    def inner(self, name: str, norm: NormFactory) -> NormFactory:
        """What makes the norm of this name."""
        growth = self.growing
        if growth is None or name not in growth.names:
            return norm
        return lambda width: Growing(norm(width), Share(growth.start, growth.steps))


@dataclass(frozen=True)
class InitRule:
    """What a topology changes about weight initialisation; models multiply their own std by `scale[role]`."""

    scale: dict[WeightRole, float] = field(default_factory=dict)
    """Factor on the std of weights by role; 1 where a role is missing."""
    keeps_depth_factor: bool = True
    """Whether the initialiser's own depth factor on output projections stays (False: the rule replaces it)."""
    std: float | None = None
    """One std for all weights, where the topology's authors fix it."""

    @classmethod
    def of_branches(cls, factor: float) -> InitRule:
        """Value, output and FFN weights times `factor`, in place of any other depth factor."""
        roles: tuple[WeightRole, ...] = ("value", "attention_out", "ffn_in", "ffn_out")
        return cls(dict.fromkeys(roles, factor), keeps_depth_factor=False)

    @property
    def is_neutral(self) -> bool:
        """Whether it leaves the model's initialisation as it is."""
        return not self.scale and self.keeps_depth_factor and self.std is None


class Link(nn.Module):
    """Joins one sublayer to the stream(s); subclasses are a topology's equation for that sublayer."""

    equation: ClassVar[str] = ""
    """In one line, as ``siamesenorm topologies NAME`` shows it."""
    drop: Drop | None
    ramp: Ramp | None
    branch: Tensor | None
    """Multiplies the update in a stack that is deeper, or less deep, than its base."""

    def __init__(self) -> None:
        super().__init__()
        self.drop = self.ramp = self.branch = None

    def forward(self, streams: Streams) -> tuple[Streams, Tensor]:
        """`read`, by a call: so that hooks on a link see what its sublayer sees."""
        return self.read(streams)

    def read(self, streams: Streams) -> tuple[Streams, Tensor]:
        """The streams (changed where the equation changes them before the sublayer) and what the sublayer sees."""
        raise NotImplementedError

    def write(self, streams: Streams, output: Tensor, keep: Keep = None) -> Streams:
        """The streams after the sublayer's output has been added; `keep` is a draw of dropout made outside."""
        raise NotImplementedError

    def no_weight_decay(self) -> set[str]:
        """Names of this link's parameters that must not be decayed, beyond the usual rule for vectors."""
        return set()

    def learning_rates(self) -> dict[str, float]:
        """Factors on the learning rate of this link's parameters, by name; 1 where a name is missing."""
        return {}

    def depth_powers(self) -> dict[str, float]:
        """Parameters, or modules of them, whose changes pile up over the stack, and with which power of its depth.

        They lie on the skip, where no branch factor weighs them.
        """
        return {}

    def width_sums(self) -> set[str]:
        """Names of this link's parameters whose products are summed over the stack's width, as a matrix' are."""
        return set()

    @property
    def written_norm(self) -> nn.Module | None:
        """The norm that the stream comes out of when it is written, where `write` ends with one."""
        return None

    def summands(self, streams: Streams, previous: Link | None) -> Sum:
        """What the sublayer sees, stream by stream, `previous` the link before; a link of several streams says it."""
        return Sum([type(self).read(self, streams)[1]], [self.read_gain(previous)])

    def read_gain(self, previous: Link | None) -> float:
        """Mean absolute gain of the norm that a single stream was last sent through before the sublayer sees it."""
        return mean_gain(None if previous is None else previous.written_norm)

    def add(self, streams: Streams, output: Tensor, gate: Tensor | None = None) -> Streams:
        """`write`, gated where there is a gate."""
        return self.write(streams, output) if gate is None else self.write(streams, output, self.draw(output, gate))

    def draw(self, output: Tensor, gate: Tensor | None = None) -> Keep:
        """What multiplies all streams' update: a draw of dropout and stochastic depth, a gate, a ramp, a branch factor.

        None where there is nothing of it.
        """
        keep = None if self.drop is None else self.drop(output)
        for factor in (gate, None if self.ramp is None else self.ramp(), self.branch):
            if factor is not None:
                keep = factor if keep is None else keep * factor
        return keep

    def dropped(self, update: Tensor, keep: Keep = None) -> Tensor:
        """The update under a draw made outside, or else under this link's own."""
        keep = self.draw(update) if keep is None else keep
        return update if keep is None else update * keep


class Step:
    """`write` of one sublayer and `read` of the next, or a `read` alone; a topology with a fused form subclasses it."""

    def __init__(self, last: Link | None, following: Link) -> None:
        self.last, self.following = last, following

    def __call__(
        self, streams: Streams, output: Tensor | None = None, gate: Tensor | None = None
    ) -> tuple[Streams, Tensor]:
        """The streams and what the next sublayer sees; `output` is what the last one gave, where there is a last."""
        if self.last is not None:
            assert output is not None
            streams = self.last.add(streams, output, gate)
        return self.following(streams)


class Topology(NeedsOnOffer, nn.Module):
    """One residual topology over a whole stack: it owns the start, the links, the end and the init rule.

    Subclasses give the class attributes, `link`, and `open`/`close` where these differ from the defaults.
    Make one with `siamesenorm.Residual(name, dim, blocks, ...)`; `register` makes one of your own known by its name.
    """

    name: ClassVar[str]
    about: ClassVar[str]
    """What it is, in sentences: where it comes from, and how it differs from its authors' code and why."""
    equation: ClassVar[str]
    """What a sublayer does to the stream(s)."""
    beginning: ClassVar[str] = "x = embed"
    end: ClassVar[str]
    """The stack's output, from the stream(s)."""
    arxiv: ClassVar[str] = "–"
    streams: ClassVar[str] = "1"
    kind: ClassVar[StreamKind]
    """Whether its stream is ever normalised, which decides its place in a siamese pair."""
    drawing: ClassVar[str] = ""
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
        needs: NeedsState = "check",
        part: bool = False,
        base_blocks: int | None = None,
        options: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        if not isinstance(dim, int) or isinstance(dim, bool) or dim < 1:
            raise TopologyError.not_allowed(f"{self.name}: dim =", dim, "a whole number from 1")
        self.dim = dim
        self.base_blocks, self.places = base_blocks, lay_out(blocks, base_blocks)
        self.norms = Norms.of(norm)
        self.options = self.options_class.parse(options or {}, self.name)
        self.fused = fused
        self.setup()
        self.open_all_needs(needs)
        self.final_norm = self.norm("final") if self.has_final_norm else None
        # A part of a pair lends its links one by one and keeps none itself.
        self.links = nn.ModuleList() if part else nn.ModuleList(self.link(place) for place in self.places)
        self._set_factors(dropout, drop_path)
        self.steps = [self.step(last, following) for last, following in pairwise([None, *self.links])]

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

    def map_streams(self, streams: Streams, function: Callable[[Tensor], Tensor]) -> Streams:
        """Every stream replaced by what a function makes of it; one tensor in two places stays one."""
        leaves, spec = pytree.tree_flatten(streams)
        made = {key: function(x) for key, x in {id(x): x for x in leaves}.items()}
        return pytree.tree_unflatten([made[id(x)] for x in leaves], spec)

    def summands_at_end(self, streams: Streams, last: Link) -> Sum:
        """The stack's output, stream by stream; `last` is its last link. A topology of several streams says it."""
        norms = self.output_norms(last)
        return Sum([type(self).close(self, streams)], [mean_gain(norms[0] if norms else None)])

    def output_norms(self, last: Link) -> list[nn.Module]:
        """The norms whose outputs, added up, are the stack's output; `last` is its last link."""
        norm = self.final_norm or last.written_norm
        return [] if norm is None else [norm]

    def no_weight_decay(self) -> set[str]:
        """Names of parameters that must not be decayed, beyond the usual rule for vectors."""
        return {f"{prefix}.{name}" for prefix, names in self._of_parts("no_weight_decay") for name in names}

    def learning_rates(self) -> dict[str, float]:
        """Factors on the learning rate of parameters, by name; 1 where a name is missing."""
        parts = self._of_parts("learning_rates")
        return {f"{prefix}.{name}": factor for prefix, factors in parts for name, factor in factors.items()}

    def _of_parts(self, method: str) -> list[tuple[str, Any]]:
        """What links and other modules inside say by a method, with their names."""
        parts = [(name, module) for name, module in self.named_modules() if module is not self]
        return [(name, getattr(module, method)()) for name, module in parts if hasattr(module, method)]

    # What every topology does --------------------------------------------------------------------------

    def norm(self, role: NormRole) -> nn.Module:
        """A fresh norm of the stack's width for a role."""
        return getattr(self.norms, role)(self.dim)

    def step(self, last: Link | None, following: Link) -> Step:
        """What runs between two links, or before the first of a block: decided once, when a stack is built."""
        return Step(last, following)

    def forward(self, x: Tensor, sublayers: Iterable[Callable[..., Any]], *args: Any, **kwargs: Any) -> Tensor:
        """Run the whole stack: every sublayer is called as ``sublayer(h, *args, **kwargs)``."""
        self.check_needs()
        self.check_step()
        self.check_input(x)
        streams, h = self.steps[0](self.open(x))
        run = 0
        for sublayer in sublayers:
            if run == len(self.links):
                raise TopologyError(f"{self.name}: the stack has {run} sublayers, one more was run")
            output, gate = output_of(sublayer(h, *args, **kwargs))
            check_returned(self.name, run, output, h.shape)
            run += 1
            if run < len(self.steps):
                streams, h = self.steps[run](streams, output, gate)
            else:
                streams = self.links[-1].add(streams, output, gate)  # type: ignore[operator]
        if run != len(self.links):
            raise TopologyError(f"{self.name}: the stack has {len(self.links)} sublayers, {run} were run")
        return self.close(streams)

    def check_step(self) -> None:
        """Warn, once, where something is to change over training and nobody says how far it is."""
        unset = [ramp for ramp in self.ramps if not ramp.is_set] if self.training else []
        if unset:
            warn(f"{self.name}, {self.options}, changes over training; call residual.set_step(step) before every step")
            for ramp in unset:
                ramp.is_set = True  # said

    def set_step(self, step: int) -> None:
        """Say which training step comes next, counted from 1; topologies with `prores` grow by it, and blends."""
        for ramp in self.ramps:
            ramp.set_step(step)

    @property
    def ramps(self) -> list[Ramp]:
        """Everything that changes with the step: its own, its links', and what sublayers have taken from it."""
        return [ramp for module in (self, *self.links, *self.lent) for ramp in ramps_of(module)]

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

    def _set_factors(self, dropout: float, drop_path: float | Sequence[float]) -> None:
        """What multiplies every link's update."""
        blocks = self.places[0].blocks
        many = isinstance(drop_path, Sequence) and not isinstance(drop_path, str)
        rates: list[Any] = list(drop_path) if many else [drop_path] * blocks  # type: ignore[arg-type]
        if len(rates) != blocks:
            raise TopologyError(f"drop_path: {len(rates)} rates for {blocks} blocks; give one rate or one per block")
        for place, link in zip(self.places, self.links, strict=False):  # a part of a pair has no links
            if dropout or any(rates):  # all links or none: blocks are of one shape
                link.drop = Drop(dropout, rates[place.block])
            if self.options.prores:
                link.ramp = Ramp(self.options.prores, place.block)
            if place.branch_factor != 1:
                link.branch = depth_factor(place.branch_factor)
