"""The coordinate check: whether activations, and what a few steps change in them, depend on a model's width or depth.

A learning rate carries over from a small model to a large one where neither does. Models of several sizes take the
same steps; sizes are root mean squares over tokens and features, and slopes are those of their logarithms over the
logarithm of width or depth: 0 is flat, 1 grows in proportion.

What sublayers put out and what the head reads must be flat. Two things may fall and must not grow. A stream: the sum of
L random branches, each 1/L, falls by L^-1/2 until steps align them, and norms read it in any size. The head's output:
a head that nothing has been taught says less the wider it is, by N^-1/2, and what it is taught is flat; so the output
changes by something in between.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from fractions import Fraction
from statistics import fmean, linear_regression
from typing import Any, Literal

import torch
from pydantic import Field, JsonValue, ValidationError
from torch import Tensor, nn

from siamesenorm.errors import InspectionError
from siamesenorm.lab.inspection.activity import rms
from siamesenorm.lab.inspection.result import Number, Numbers, ResultPart
from siamesenorm.lab.inspection.watch import replaced
from siamesenorm.models.stack import Block, Context, Stack
from siamesenorm.residual.flow import Streams
from siamesenorm.train.config import OptimizerConfig
from siamesenorm.train.optimizer import build_optimizer, set_lr

Direction = Literal["width", "depth"]
Loss = Callable[[nn.Module, Mapping[str, Tensor]], Tensor]
FLAT = 0.3
"""Slopes up to here count as flat: twice as wide or deep, a quantity changes by less than a quarter."""
HEIGHTS = 3
"""Heights of the stack at which is measured, at most."""
SLOWEST = -0.45
"""A slope of the output's updates below which nothing but the untaught head is seen in them."""
OUTPUT, HIDDEN = "output", "hidden"
Kind = Literal["stream", "sublayer", "hidden", "output"]


class Coordinate(ResultPart):
    """One quantity, in models of every size."""

    name: str
    """What is measured, and behind which share of the blocks: ``x 1/2``, ``attention 1``."""
    kind: Kind
    sizes: Numbers
    """At the start, by size of the model."""
    updates: Numbers
    """Of what the steps have changed."""
    size_slope: Number = None
    update_slope: Number = None

    @property
    def is_flat(self) -> bool:
        """Whether neither depends on the model's size."""
        return not self.steep

    @property
    def steep(self) -> list[tuple[str, float]]:
        """Which of both is not flat, and its slope; one that has none is infinite."""
        lowest = {"stream": -math.inf, "output": SLOWEST}.get(self.kind, -FLAT)
        slopes = {"size": self.size_slope, "update": self.update_slope}
        if self.kind == "output":
            del slopes["size"]
        found = {name: math.inf if slope is None else slope for name, slope in slopes.items()}
        return [(name, slope) for name, slope in found.items() if not lowest <= slope <= FLAT]


class Axis(ResultPart):
    """Models that differ in width or in depth alone."""

    direction: Direction
    multiples: tuple[int, ...]
    values: tuple[int, ...]
    """Widths, or numbers of blocks."""
    coordinates: tuple[Coordinate, ...]

    @property
    def is_flat(self) -> bool:
        """Whether every quantity is."""
        return all(each.is_flat for each in self.coordinates)

    @property
    def steepest(self) -> tuple[str, float] | None:
        """What is least flat, and its slope; None where all is flat."""
        found = [(f"{what} of {each.name}", slope) for each in self.coordinates for what, slope in each.steep]
        return max(found, key=lambda entry: abs(entry[1]), default=None)


class Coordinates(ResultPart):
    """A whole check."""

    source: dict[str, JsonValue] = Field(default_factory=dict)
    topology: str
    parametrization: str
    optimizer: str
    lr: float
    steps: int
    seeds: int
    axes: tuple[Axis, ...]

    @property
    def is_flat(self) -> bool:
        """Over every axis."""
        return all(axis.is_flat for axis in self.axes)

    def to_json(self) -> str:
        """All numbers."""
        return self.model_dump_json(indent=1) + "\n"


def check_coordinates(
    model: Stack[Any],
    loss: Loss,
    batches: Sequence[Mapping[str, Tensor]],
    optimizer: OptimizerConfig,
    *,
    widths: Sequence[int] = (1, 2, 4),
    depths: Sequence[int] = (1, 2, 4),
    seeds: int = 1,
    prepare: Callable[[Stack[Any]], None] = lambda model: None,
    progress: Callable[[int, int], None] = lambda done, of: None,
) -> Coordinates:
    """Train copies of a model that are wider and deeper by these multiples, a step a batch, and measure on the first.

    Each begins with first weights of its own, by the same rule as `model`, and is prepared. A wider model has more
    heads.
    """
    plans: list[tuple[Direction, tuple[int, ...]]] = [("width", tuple(widths)), ("depth", tuple(depths))]
    total, done = seeds * sum(len(multiples) for _, multiples in plans if len(multiples) > 1), 0
    axes: list[Axis] = []
    for direction, multiples in plans:
        if len(multiples) < 2:
            continue
        found: list[list[dict[str, tuple[float, float]]]] = []
        for multiple in multiples:
            runs = []
            for seed in range(seeds):
                made = scaled(model, direction, multiple, seed)
                prepare(made)
                runs.append(measure(made, loss, batches, optimizer, model.config.blocks))
                done += 1
                progress(done, total)
            found.append(runs)
        own = model.config.dim if direction == "width" else model.config.blocks
        values = tuple(own * multiple for multiple in multiples)
        axes.append(
            Axis(direction=direction, multiples=multiples, values=values, coordinates=tuple(_compare(values, found)))
        )
    config = model.config
    return Coordinates(
        topology=config.topology,
        parametrization=config.parametrization,
        optimizer=optimizer.kind,
        lr=optimizer.lr,
        steps=len(batches),
        seeds=seeds,
        axes=tuple(axes),
    )


def scaled(model: Stack[Any], direction: Direction, multiple: int, seed: int) -> Stack[Any]:
    """A model so many times as wide or as deep, with first weights of its own, on the device and in the dtype."""
    fields: dict[str, Any] = model.config.model_dump()
    if direction == "depth":
        fields["blocks"] *= multiple
    else:
        head = fields.get("head_dim")
        for name in ("dim", "heads", "kv_heads", "ffn_dim"):
            if fields.get(name) is not None:
                fields[name] *= multiple
        if fields.get("moe") is not None:
            fields["moe"]["expert_dim"] *= multiple
        fields |= {} if head is None else {"head_dim": head}
    try:
        config = type(model.config).model_validate(fields)
    except ValidationError as error:
        raise InspectionError.refused(f"--{direction}s", multiple, error.errors()[0]["msg"]) from None
    weight = next(model.parameters())
    return type(model)(config, seed=seed).to(weight.device, weight.dtype)


def heights(blocks: int) -> tuple[float, ...]:
    """Shares of a stack that the smallest model has whole blocks at, up to all of it."""
    count = min(HEIGHTS, blocks)
    return tuple(sorted({max(1, round(blocks * (k + 1) / count)) / blocks for k in range(count)}))


def measure(
    model: Stack[Any],
    loss: Loss,
    batches: Sequence[Mapping[str, Tensor]],
    config: OptimizerConfig,
    blocks: int,
) -> dict[str, tuple[float, float]]:
    """Quantities of the first batch by name: their size at the start, and of what a step on every batch changed.

    blocks: of the smallest model, at whose heights is measured.
    """
    optimizer = build_optimizer(model, config)
    set_lr(optimizer, config.lr)
    before = observe(model, loss, batches[0], blocks)
    model.train()
    for step, batch in enumerate(batches):
        torch.manual_seed(step)
        optimizer.zero_grad(set_to_none=True)
        loss(model, batch).backward()
        optimizer.step()
    after = observe(model, loss, batches[0], blocks)
    return {name: (rms(then), rms(after[name] - then)) for name, then in before.items() if name in after}


@torch.no_grad()
def observe(model: Stack[Any], loss: Loss, batch: Mapping[str, Tensor], blocks: int) -> dict[str, Tensor]:
    """Streams, what sublayers put out, and the model's output, at the heights of a model of so many blocks."""
    last, times, seen = len(model.blocks), len(model.blocks) / blocks, dict[str, Tensor]()
    behind = {round(share * last): _share(share) for share in heights(blocks)}
    # A block of the smallest model stands where the first of so many does; laws of depth begin there.
    within = {round((round(share * blocks) - 1) * times) + 1: _share(share) for share in heights(blocks)}

    def run(block: Block, streams: Streams, context: Context) -> Any:
        number = next(k for k, own in enumerate(model.blocks, 1) if own is block)
        hooks = []
        if (label := within.get(number)) is not None:
            for name in ("attention", "ffn"):
                hooks.append(getattr(block, name).register_forward_hook(_keep(seen, f"{name} {label}")))
        carried, reported = block(streams, context)
        for hook in hooks:
            hook.remove()
        if (label := behind.get(number)) is not None:
            for name, stream in model.residual.named_streams(carried).items():
                seen[f"{name} {label}"] = stream.detach().clone()
        if number == last:
            hidden = model.residual.close(carried)
            seen[HIDDEN] = hidden.detach().clone()
            if model.head is None:
                seen[OUTPUT] = model.logits(hidden)
        return carried, reported

    hook = model.head.register_forward_hook(_keep(seen, OUTPUT)) if isinstance(model.head, nn.Module) else None
    model.eval()
    torch.manual_seed(0)
    try:
        with replaced(model, "run", run):
            loss(model, batch)
    finally:
        if hook is not None:
            hook.remove()
    return seen


def _keep(seen: dict[str, Tensor], name: str) -> Any:
    def keep(module: nn.Module, inputs: Any, output: Any) -> None:
        tensor = output[0] if isinstance(output, tuple) else output
        seen[name] = tensor.detach().clone()

    return keep


def _share(share: float) -> str:
    return str(Fraction(share).limit_denominator(100))


def _compare(values: Sequence[int], found: list[list[dict[str, tuple[float, float]]]]) -> list[Coordinate]:
    """What all models have, with slopes."""
    names = [name for name in found[0][0] if all(name in run for runs in found for run in runs)]
    coordinates = []
    for name in names:
        sizes, updates = ([fmean(run[name][k] for run in runs) for runs in found] for k in (0, 1))
        coordinates.append(
            Coordinate(
                name=name,
                kind=kind_of(name),
                sizes=tuple(sizes),
                updates=tuple(updates),
                size_slope=slope(values, sizes),
                update_slope=slope(values, updates),
            )
        )
    return coordinates


def kind_of(name: str) -> Kind:
    """What a quantity is."""
    if name in (OUTPUT, HIDDEN):
        return "output" if name == OUTPUT else "hidden"
    return "sublayer" if name.split()[0] in ("attention", "ffn") else "stream"


def slope(values: Sequence[int], sizes: Sequence[float]) -> float | None:
    """Of the logarithm of sizes over that of width or depth; 0 where all are 0, None where that has no meaning."""
    if not any(sizes):
        return 0.0
    if not all(math.isfinite(size) and size > 0 for size in sizes):
        return None
    return linear_regression([math.log(value) for value in values], [math.log(size) for size in sizes]).slope
