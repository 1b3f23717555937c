"""Facts about every topology, read from the classes and counted on real stacks: for the command line and the docs."""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, get_type_hints

from torch import nn

from siamesenorm.residual import TOPOLOGIES, InitRule, Link, Residual, SublayerNeeds, Topology
from siamesenorm.residual.options import describe_type
from siamesenorm.residual.registry import register_waiting

BLOCKS = 12
DIM = 768
WIDTHS = (8, 16, 24)  # three give the polynomial; building small is faster than what `meta` imports for hyper

PAIRING = {
    "post": "the first stream, siamese:x={name}",
    "pre": "the second stream, siamese:y={name}",
    "mixed": "no: Post-Norm in some blocks, Pre-Norm in others",
    "several": "no: it has several streams itself",
}


@dataclass(frozen=True)
class Count:
    """A number of parameters that grows with the width d: ``per_square · d² + per_width · d + constant``."""

    per_width: int
    constant: int
    per_square: int = 0

    @classmethod
    def through(cls, counts: Sequence[int]) -> Count:
        """The polynomial through the counts at `WIDTHS`, which are multiples of the first."""
        unit, (one, two, three) = WIDTHS[0], counts
        square, rest = divmod(three - 2 * two + one, 2 * unit**2)
        slope, left = divmod(two - one - square * 3 * unit**2, unit)
        if rest or left:
            raise AssertionError(f"parameter counts {counts} at widths {WIDTHS} lie on no polynomial in d")
        return cls(slope, one - slope * unit - square * unit**2, square)

    def at(self, dim: int) -> int:
        """The number at one width."""
        return self.per_square * dim**2 + self.per_width * dim + self.constant

    def __str__(self) -> str:
        terms = ((self.per_square, "d²"), (self.per_width, "d"), (self.constant, ""))
        return " + ".join(f"{count if count != 1 or not of else ''}{of}" for count, of in terms if count) or "0"


@dataclass(frozen=True)
class OptionFact:
    """One option of a topology."""

    name: str
    value: str
    """In force: given, or what the default comes to."""
    default: str | None
    """None where it follows from the other options."""
    allowed: str
    help: str


@dataclass(frozen=True)
class LinkFact:
    """The same link in a run of blocks, for one or more of a block's sublayers."""

    first: int
    last: int
    sublayers: tuple[str, ...]
    equation: str
    parameters: Count
    """Of one such link."""
    factors: tuple[float, float] | None
    """The equation's constant (a, 1/c or 1/sqrt(l+1)) in the first and in the last of the blocks."""


@dataclass(frozen=True)
class TopologyFacts:
    """What is to be said about a topology with given options in a stack of `blocks` blocks."""

    name: str
    spec: str
    about: str
    equation: str
    start: str
    end: str
    streams: str
    pairing: str
    arxiv: str
    drawing: str
    blocks: int
    per_block: Count
    """Of a middle block, with RMSNorm; norms inside sublayers belong to the sublayers."""
    once: Count
    """At the start and the end of the stack."""
    needs: dict[str, SublayerNeeds]
    init_rule: InitRule
    learning_rates: dict[str, float]
    """Factors on the learning rate by parameter, without the number of its link; 1 for all others."""
    no_weight_decay: tuple[str, ...]
    """Parameters that are never decayed, whatever the optimiser's rule for vectors and matrices."""
    options: tuple[OptionFact, ...]
    links: tuple[LinkFact, ...]

    def total(self, dim: int) -> int:
        """Parameters of the whole topology at width `dim`."""
        of_links = sum(
            (fact.last - fact.first + 1) * len(fact.sublayers) * fact.parameters.at(dim) for fact in self.links
        )
        return of_links + self.once.at(dim)

    def as_json(self, dim: int = DIM) -> dict[str, Any]:
        """Everything, as plain JSON values."""
        values = dataclasses.asdict(self)
        counts = {"per_block": self.per_block, "once": self.once}
        values["parameters"] = {
            **{key: {"text": str(count), **values.pop(key)} for key, count in counts.items()},
            "dim": dim,
            "blocks": values.pop("blocks"),
            "total": self.total(dim),
        }
        return values


def catalogue() -> list[TopologyFacts]:
    """The facts of every registered topology with its default options."""
    register_waiting()
    return [describe(name) for name in TOPOLOGIES]


def describe(spec: str, blocks: int = BLOCKS) -> TopologyFacts:
    """The facts of ``name`` or ``name:option=value,…``."""
    made = [Residual(spec, dim, blocks) for dim in WIDTHS]
    small = made[0]
    links = list(zip(small.places, *(topology.links for topology in made), strict=True))
    middle = [same for place, *same in links if place.block == blocks // 2]
    return TopologyFacts(
        name=small.name,
        spec=spec_of(small),
        about=_plain(small.about),
        equation=small.equation,
        start=small.beginning,
        end=small.end,
        streams=small.streams,
        pairing=PAIRING[small.kind].format(name=small.name),
        arxiv=small.arxiv,
        drawing=small.drawing.strip("\n"),
        blocks=blocks,
        per_block=Count.through([_size(*of_width) for of_width in zip(*middle, strict=True)]),
        once=Count.through([_size(topology) - _size(topology.links) for topology in made]),
        needs={place.kind: small.needs(place) for place in small.places if place.block == 0},
        init_rule=small.init_rule,
        learning_rates={_unnumbered(name): factor for name, factor in sorted(small.learning_rates().items())},
        no_weight_decay=tuple(sorted(set(map(_unnumbered, small.no_weight_decay())))),
        options=tuple(_options(small)),
        links=tuple(_runs(links)),
    )


def spec_of(topology: Topology) -> str:
    """The text that makes this topology: its name and the options that differ from the defaults."""
    changed = [
        f"{field.name}={_text(getattr(topology.options, field.name))}"
        for field in topology.options.listed()
        if getattr(topology.options, field.name) != field.default
    ]
    return f"{topology.name}:{','.join(changed)}" if changed else topology.name


def _unnumbered(name: str) -> str:
    return re.sub(r"^links\.\d+\.", "", name)


def _size(*modules: nn.Module) -> int:
    return sum(parameter.numel() for module in modules for parameter in module.parameters())


def _options(topology: Topology) -> Iterable[OptionFact]:
    hints = get_type_hints(topology.options_class)
    for field in topology.options.listed():
        value = getattr(topology.options, field.name)
        if value is None:  # left to the topology, which keeps what it chose under the option's own name
            value = getattr(topology, field.name)
        yield OptionFact(
            name=field.name,
            value=_text(value),
            default=None if field.default is None else _text(field.default),
            allowed=_allowed(hints[field.name], field.metadata),
            help=field.metadata["help"],
        )


def _allowed(hint: Any, metadata: Any) -> str:
    low, high = metadata["low"], metadata["high"]
    limits = "" if low is None and high is None else f" from {low}" if high is None else f" from {low} to {high}"
    return describe_type(hint) + limits


def _text(value: Any) -> str:
    if isinstance(value, Topology):
        return spec_of(value)
    if value is None or isinstance(value, (bool, nn.Module)):  # a norm that is there, or is not
        return "false" if value is None or value is False else "true"
    return str(value)


def _constant(link: Any) -> float | None:
    """The number by which a link differs from those of other blocks, where it has one."""
    scale = getattr(link, "scale", None)
    return None if scale is None else float(scale)


def _runs(links: list[tuple[Any, ...]]) -> Iterable[LinkFact]:
    """Links of one kind of sublayer in following blocks that differ in their constant alone, as one."""
    by_sublayer = sorted(links, key=lambda item: item[0].position)
    facts = [
        (place, equation_of(same[0]), Count.through([_size(link) for link in same]), _constant(same[0]))
        for place, *same in by_sublayer
    ]
    runs: dict[tuple[Any, ...], list[str]] = {}
    for _, group in itertools.groupby(facts, key=lambda fact: (fact[0].position, *fact[1:3], fact[3] is None)):
        run = list(group)
        (first, equation, count, scale), (last, *_, last_scale) = run[0], run[-1]
        factors = None if scale is None else (scale, last_scale)
        runs.setdefault((first.block, last.block, equation, count, factors), []).append(first.kind)
    return [
        LinkFact(first, last, tuple(kinds), equation, count, factors)
        for (first, last, equation, count, factors), kinds in sorted(runs.items(), key=lambda item: item[0][0])
    ]


def equation_of(link: Link) -> str:
    """A link's equation; for a pair, the equations of both streams."""
    x, y = getattr(link, "x", None), getattr(link, "y", None)
    if not isinstance(x, Link) or not isinstance(y, Link):
        return link.equation
    seen = ("" if getattr(link, "gain", None) is None else "g * ") + "x + y"
    reads = f"N_in({seen})" if getattr(link, "input_norm", None) is not None else seen
    by_x, by_y = (part.equation.partition(": ")[0] for part in (x, y))
    return f"F reads {reads}\nX by {by_x}\nY by {by_y}"


def _plain(text: str) -> str:
    """Without the code marks, and with one line per paragraph."""
    paragraphs = re.sub(r"`+([^`]*)`+", r"\1", text.strip()).split("\n\n")
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)
