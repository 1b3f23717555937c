"""The plan of a study: everything that is decided before the first run, typed, and checked in one sentence.

file = read_plan("docs/evidence/language.yaml")
file.digest, file.plan.parts[0].name
"""

from __future__ import annotations

import hashlib
import json
import math
import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Field, Strict, ValidationError, model_validator

from siamesenorm.data.reading import read_bytes
from siamesenorm.errors import ConfigError, DataError, FieldError, shown
from siamesenorm.tasks.base import Section
from siamesenorm.train.fields import as_written, explain
from siamesenorm.train.recipes import load_recipe
from siamesenorm.train.yaml import LARGEST, read_yaml

Values = dict[str, Any]
"""Fields of the configuration by dotted name."""
Strings = Annotated[tuple[str, ...], Strict(False)]  # YAML has lists alone
Anything = Annotated[tuple[Any, ...], Strict(False)]
Wholes = Annotated[tuple[int, ...], Strict(False)]
Rates = Annotated[tuple[float, ...], Strict(False), AfterValidator(lambda v: _positive_and_distinct(v))]
TOPOLOGY, OPTIMIZER, LR, SEED, SCHEDULE = (
    "model.topology",
    "optimizer.kind",
    "optimizer.lr",
    "train.seed",
    "schedule.kind",
)
DECIDED = (TOPOLOGY, OPTIMIZER, SEED)
"""Fields that arms, parts and seeds decide; nothing else may set them."""
DIGITS = 3
"""Of a number that is drawn."""
NAME, TITLE = re.compile(r"[A-Za-z0-9][A-Za-z0-9_.+-]{0,39}"), re.compile(r"[^\x00-\x1f\x7f|`<>]+")
"""Names that go into titles and folders, and words that go into tables."""
MOST = 4096
"""Configurations, seeds or parts; more are a slip of the finger."""


def _positive_and_distinct(values: tuple[float, ...]) -> tuple[float, ...]:
    for number, value in enumerate(values):
        if not (math.isfinite(value) and value > 0):
            raise ValueError(f"{value:g} is not allowed; it takes finite numbers above 0")
        if f"{value:g}" in {f"{earlier:g}" for earlier in values[:number]}:  # rates are rounded to as many digits
            raise ValueError(f"{value:g} is given twice; it takes distinct numbers")
    return values


class Corpus(Section):
    """Data that cells are trained and measured on."""

    about: str = Field(default="", description="What it is, and where it comes from.")
    set: Values = Field(description="Fields that name the data, such as data.train.")
    sha256: dict[str, str] = Field(
        default_factory=dict, description="Hash of every file or set that they name; others are refused."
    )


class Size(Section):
    """A shape of the model with its length of training."""

    set: Values = Field(description="Fields of shape and budget, such as model.dim and train.steps.")


class Draw(Section):
    """What a field is drawn from: a range, by its logarithm or evenly, or some choices."""

    low: float | None = Field(default=None, description="Least value.")
    high: float | None = Field(default=None, description="Largest value.")
    scale: Literal["log", "linear"] = Field(default="log", description="Evenly in the logarithm, or in the value.")
    choices: Anything | None = Field(default=None, description="Values instead of a range.")

    @model_validator(mode="after")
    def _check(self) -> Draw:
        ranged = self.low is not None and self.high is not None
        if (self.choices is not None) == ranged or (self.choices is not None and not self.choices):
            raise ValueError("it takes low and high, or choices")
        if self.low is not None and self.high is not None and not self.low < self.high:
            raise ValueError(f"low = {self.low:g} is not allowed; it takes less than high = {self.high:g}")
        if ranged and self.scale == "log" and (self.low or 0) <= 0:
            raise ValueError(f"low = {self.low:g} is not allowed with scale log; it takes a number above 0")
        return self

    def value(self, share: float) -> Any:
        """What a share of 0 to 1 of the range, or of the choices, stands for."""
        if self.choices is not None:
            return self.choices[min(int(share * len(self.choices)), len(self.choices) - 1)]
        assert self.low is not None
        assert self.high is not None
        if self.scale == "log":
            found = math.exp(math.log(self.low) + share * math.log(self.high / self.low))
        else:
            found = self.low + share * (self.high - self.low)
        return float(f"{found:.{DIGITS}g}")


class Search(Section):
    """The random search that every arm gets: draw k is the same for all of them."""

    space: dict[str, Draw] = Field(min_length=1, description="What fields are drawn from, by dotted name.")
    seed: int = Field(default=0, ge=0, lt=2**31, description="Decides the draws.")
    run_seed: int = Field(
        default=1000, ge=0, lt=2**31, description="Seed that all runs of the search are trained with."
    )

    def draw(self, number: int) -> Values:
        """The fields of draw `number`, whatever the number of draws."""
        chance = {name: random.Random(f"{self.seed}/{number}/{name}").random() for name in self.space}
        return {name: self.space[name].value(share) for name, share in chance.items()}


class Sensitivity(Section):
    """Learning rates that an arm is trained at with its best other settings (arXiv 2309.14322)."""

    rates: Rates = Field(min_length=2, description="Log-spaced learning rates.")


class Stress(Section):
    """Constant learning rates above the best (arXiv 2608.30320)."""

    factors: Rates = Field(default=(2.0, 4.0), min_length=1, description="Times the best learning rate.")
    seeds: int = Field(default=2, ge=1, le=MOST, description="How many of the fresh seeds.")


class Statistics(Section):
    """How figures are compared."""

    confidence: float = Field(default=0.95, gt=0.5, lt=1, description="Of intervals, and 1 - the rate of false finds.")
    correction: Literal["holm"] = Field(
        default="holm", description="Of chances, within the comparisons of one part; intervals are Bonferroni's."
    )
    resamples: int = Field(default=2000, ge=100, le=100_000, description="Of seeds, for intervals of speed-ups.")


class StudyPart(Section):
    """What is run together; a study may be cut behind any part."""

    name: str = Field(min_length=1, max_length=60, description="How it is called.")
    corpus: str = Field(description="One of corpora.")
    size: str = Field(description="One of sizes.")
    optimizer: Literal["adamw", "muon"] = Field(default="adamw", description="adamw or muon.")
    arms: Strings | None = Field(default=None, min_length=1, description="Some of arms; null: all.")
    configurations: int = Field(ge=1, le=MOST, description="Draws of the search, of every arm.")
    seeds: int = Field(ge=1, le=MOST, description="Fresh seeds that each arm's best configuration is trained with.")
    sensitivity: bool = Field(default=False, description="Whether learning-rate sensitivity is measured.")
    stress: bool = Field(default=False, description="Whether rates above the best are.")
    cut: str = Field(default="", description="What cannot be said if the study is cut before this part.")

    @property
    def place(self) -> tuple[str, str, str]:
        """What its cells share."""
        return self.corpus, self.size, self.optimizer


class StudyPlan(Section):
    """All that is decided before the first run."""

    name: str = Field(min_length=1, max_length=60, pattern=r"^[a-z0-9][a-z0-9-]*$", description="Letters, digits, -.")
    about: str = Field(default="", description="The question.")
    recipe: str | dict[str, Any] = Field(description="What is trained: the name of a recipe, or its sections.")
    set: Values = Field(default_factory=dict, description="Fields that all cells share.")
    arms: dict[str, str] = Field(min_length=2, description="Topologies by the name of their arm.")
    baseline: str = Field(description="The arm that others are compared with.")
    corpora: dict[str, Corpus] = Field(min_length=1, description="Data, with hashes.")
    sizes: dict[str, Size] = Field(min_length=1, description="Shapes, each with its budget.")
    search: Search = Field(description="The random search.")
    seeds: Wholes = Field(min_length=1, max_length=MOST, description="Fresh seeds, in the order they are taken.")
    metric: str = Field(default="loss", min_length=1, description="The held-out number that decides.")
    sensitivity: Sensitivity | None = Field(default=None, description="Learning rates tried one by one.")
    stress: Stress | None = Field(default=None, description="Constant rates above the best.")
    statistics: Statistics = Field(default=Statistics(), description="How figures are compared.")
    cannot_say: Strings = Field(default=(), description="Sentences that stand beside the results.")
    parts: Annotated[tuple[StudyPart, ...], Strict(False)] = Field(
        min_length=1, max_length=MOST, description="In the order they are run."
    )

    @model_validator(mode="after")
    def _check(self) -> StudyPlan:
        _known("baseline", self.baseline, self.arms)
        names = [part.name for part in self.parts]
        places = [part.place for part in self.parts]
        for number, part in enumerate(self.parts):
            where = f"parts.{part.name}"
            _known(f"{where}.corpus", part.corpus, self.corpora)
            _known(f"{where}.size", part.size, self.sizes)
            for arm in part.arms or ():
                _known(f"{where}.arms", arm, self.arms)
            if part.arms is not None and self.baseline not in part.arms:
                raise ValueError(f"{where}.arms: has no {self.baseline!r}; the baseline belongs to every part")
            if names.index(part.name) != number:
                raise ValueError(f"parts: the name {part.name!r} is given twice")
            if places.index(part.place) != number:
                raise ValueError(f"{where}: {' '.join(part.place)} is a part already; give it one entry")
            if part.seeds > len(self.seeds):
                raise FieldError.refused(f"{where}.seeds", part.seeds, f"seeds has {len(self.seeds)}")
            for name, wanted in (("sensitivity", part.sensitivity), ("stress", part.stress)):
                if wanted and getattr(self, name) is None:
                    raise ValueError(f"{where}.{name}: true is not allowed; the plan has no section {name}")
        if len(set(self.seeds)) < len(self.seeds):
            raise ValueError("seeds: one is given twice")
        if self.search.run_seed in self.seeds:
            raise FieldError.refused("seeds", self.search.run_seed, "the seed of the search is none of those compared")
        self._check_names()
        self._check_fields()
        return self

    def _check_names(self) -> None:
        for where, names in (("arms", self.arms), ("corpora", self.corpora), ("sizes", self.sizes)):
            for name in names:
                if not NAME.fullmatch(name):
                    raise ValueError(
                        f"{where}: the name {shown(name)} is not allowed; it takes up to 40 letters, digits and _ . + -"
                    )
        for part in self.parts:
            if not TITLE.fullmatch(part.name):
                raise ValueError(f"parts: the name {shown(part.name)} is not allowed; it takes words on one line")

    def _check_fields(self) -> None:
        sections = {"set": self.set, "search.space": self.search.space}
        sections |= {f"sizes.{name}.set": size.set for name, size in self.sizes.items()}
        sections |= {f"corpora.{name}.set": corpus.set for name, corpus in self.corpora.items()}
        for where, fields in sections.items():
            for field in DECIDED:
                if field in fields:
                    raise ValueError(f"{where}: {field} is not allowed; arms, parts and seeds decide it")

    def arms_of(self, part: StudyPart) -> tuple[str, ...]:
        """Names of a part's arms, the baseline first."""
        arms = [arm for arm in self.arms if part.arms is None or arm in part.arms]
        return (self.baseline, *(arm for arm in arms if arm != self.baseline))

    def part(self, corpus: str, size: str, optimizer: str) -> StudyPart | None:
        """The part that cells of a place belong to."""
        return next((part for part in self.parts if part.place == (corpus, size, optimizer)), None)


def _known(where: str, name: str, known: Mapping[str, Any]) -> None:
    if name not in known:
        raise FieldError.unknown(where, name, known)


@dataclass(frozen=True)
class PlanFile:
    """A plan as it stands in its file."""

    plan: StudyPlan
    text: bytes
    values: dict[str, Any]
    """What its YAML says."""
    recipe: dict[str, Any]
    """What the plan's recipe says, its bases included."""

    @property
    def digest(self) -> str:
        """SHA-256 of what it says; comments and defaults of this version do not count."""
        return hashlib.sha256(json.dumps(self.values, sort_keys=True).encode()).hexdigest()


def read_plan(path: Path | str) -> PlanFile:
    """A plan from its file; what is wrong with it is one sentence."""
    try:
        text = read_bytes(Path(path), "plan", LARGEST)
        values = read_yaml(text.decode(), str(path))
    except UnicodeDecodeError:
        raise ConfigError(f"plan: {str(path)!r} is not UTF-8 text") from None
    except DataError as error:
        raise ConfigError(str(error)) from None
    if not isinstance(values, dict) or not values:
        raise ConfigError(f"plan: {str(path)!r} is no plan; it takes fields such as arms, sizes and parts")
    plan = parse_plan(values)
    return PlanFile(plan, text, values, load_recipe(plan.recipe))


def parse_plan(values: Mapping[str, Any]) -> StudyPlan:
    """A plan from its values."""
    _check_inside(values)
    try:
        return StudyPlan.model_validate(dict(values))
    except ValidationError as error:
        raise ConfigError(f"plan: {explain(error, StudyPlan)}") from None


def _check_inside(values: Mapping[str, Any]) -> None:
    """Check what stands in lists and under names of one's own, so that errors name it."""
    search, parts = values.get("search"), values.get("parts")
    collections: list[tuple[str, type[Section], Any]] = [
        ("corpora", Corpus, values.get("corpora")),
        ("sizes", Size, values.get("sizes")),
        ("search.space", Draw, search.get("space") if isinstance(search, Mapping) else None),
        (
            "parts",
            StudyPart,
            {_part_name(part, n): part for n, part in enumerate(parts)} if isinstance(parts, list) else None,
        ),
    ]
    for where, kind, inner in collections:
        for name, value in inner.items() if isinstance(inner, Mapping) else ():
            if not isinstance(value, Mapping):
                fields = ", ".join(kind.model_fields)
                raise ConfigError.not_allowed(f"plan: {where}.{name}", value, f"the fields {fields}")
            try:
                kind.model_validate(dict(value))
            except ValidationError as error:
                raise ConfigError(f"plan: {where}.{name}.{explain(error, kind)}") from None


def _part_name(part: Any, number: int) -> str:
    name = part.get("name") if isinstance(part, Mapping) else None
    return name[:60] if isinstance(name, str) and name else str(number)


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    """What differs between two plans, a sentence each, fields by dotted name."""
    one, other = dict(_flat(before)), dict(_flat(after))
    found = []
    for name, names in _orders(before).items():
        now = [item for item in _orders(after).get(name, []) if item in names]
        then = [item for item in names if item in now]
        if then != now:
            found.append(f"{name}: the order {', '.join(then)} became {', '.join(now)}")
    for name in {**one, **other}:
        if name not in one:
            found.append(f"{name}: {as_written(other[name])} is new")
        elif name not in other:
            found.append(f"{name}: {as_written(one[name])} was taken out")
        elif json.dumps(one[name], sort_keys=True) != json.dumps(other[name], sort_keys=True):  # 1 is not 1.0 there
            found.append(f"{name}: {as_written(one[name])} became {as_written(other[name])}")
    return found


def _orders(values: Mapping[str, Any]) -> dict[str, list[str]]:
    """Names of the items of every list of sections, such as parts, in their order."""
    return {name: [item for item, _ in _named(value)] for name, value in values.items() if _named(value)}


def _named(value: Any) -> list[tuple[str, Any]]:
    """The items of a list of sections by name; none of anything else."""
    if not isinstance(value, list) or not all(isinstance(item, Mapping) for item in value):
        return []
    return [(str(item.get("name", number)), item) for number, item in enumerate(value)]


def _flat(value: Any, prefix: str = "") -> list[tuple[str, Any]]:
    inner = list(value.items()) if isinstance(value, Mapping) else _named(value)
    if not inner:
        return [(prefix, value)] if prefix else []
    return [pair for name, item in inner for pair in _flat(item, f"{prefix}.{name}" if prefix else str(name))]
