"""What a grid says: paired differences with confidence intervals, stable learning rates, and cost.

A run that diverged counts as the worst: as far from a good one as the worst run that reached its end, or as a model
that has learnt nothing of its input. To leave it out would be to judge a topology by the seeds it survived.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any

from siamesenorm.errors import ConfigError
from siamesenorm.lab.report.conditions import Conditions, conditions
from siamesenorm.lab.report.cost import Cost, costs
from siamesenorm.lab.report.records import Records
from siamesenorm.lab.report.student import CONFIDENCE, Interval, holm, paired
from siamesenorm.tasks import find_task

NEAR = 0.02
"""A learning rate is near the best where the metric is within this share of it."""
WORST = ("diverged", "stuck")
"""Ends of runs that count as the worst."""


@dataclass(frozen=True)
class SeedScores:
    """The seeds of one topology at one learning rate."""

    topology: str
    setting: str
    lr: float
    scores: dict[int, float]
    """By seed, of runs that reached their end."""
    failed: dict[int, str]
    """By seed, how the others ended: diverged or stuck."""
    of: int = 0
    """Seeds that there are in all, of any topology; 0: as many as here."""

    @property
    def stable(self) -> bool:
        """Whether every seed reached its end."""
        return bool(self.scores) and not self.failed

    @property
    def lost(self) -> set[int]:
        """Seeds that count as the worst."""
        return {seed for seed, state in self.failed.items() if state in WORST}

    def counted(self, worst: float | None) -> dict[int, float]:
        """Scores by seed, with the worst one for those that are lost."""
        return {**self.scores, **({} if worst is None else dict.fromkeys(self.lost, worst))}

    @property
    def mean(self) -> float | None:
        """Over the seeds that reached their end."""
        return statistics.fmean(self.scores.values()) if self.scores else None

    @property
    def spread(self) -> float | None:
        """Standard deviation over seeds."""
        return statistics.stdev(self.scores.values()) if len(self.scores) > 1 else None


@dataclass(frozen=True)
class Range:
    """Which learning rates a topology took."""

    topology: str
    setting: str
    best: float | None
    stable: tuple[float, ...]
    """Where every seed reached its end."""
    near: tuple[float, ...]
    """Where the mean is within two percent of the best."""
    failing: tuple[float, ...]
    """Where at least one seed did not."""
    tried: tuple[float, ...]


@dataclass(frozen=True)
class PairedComparison:
    """A topology against the baseline, seed by seed; negative differences are better for losses."""

    topology: str
    baseline: str
    setting: str
    lr: float
    baseline_lr: float
    score: float
    baseline_score: float
    difference: Interval
    lost: int = 0
    """Seeds of the topology that diverged and count as the worst."""
    baseline_lost: int = 0
    worst: float | None = None
    """What they count as."""
    corrected_p: float | None = None
    """How often chance alone gives such a difference, corrected for the comparisons of its family."""
    family: int = 1
    """Comparisons of which one is expected to stand out by chance."""
    confidence: float = CONFIDENCE
    """1 - the rate of false finds of the family."""

    @property
    def clear(self) -> bool:
        """Whether the difference can be told from chance."""
        return self.corrected_p is not None and self.corrected_p < 1 - self.confidence


@dataclass(frozen=True)
class Analysis:
    """Everything that a report says of its runs."""

    metric: str
    unit: str
    higher_is_better: bool
    baseline: str
    confidence: float
    conditions: Conditions
    places: tuple[SeedScores, ...]
    ranges: tuple[Range, ...]
    same_lr: tuple[PairedComparison, ...]
    """At every learning rate that both took."""
    best_lr: tuple[PairedComparison, ...]
    """Each at its own best learning rate."""
    costs: tuple[Cost, ...]

    def place(self, topology: str, setting: str, lr: float) -> SeedScores | None:
        """The seeds of one topology at one learning rate, if there are any."""
        found = (p for p in self.places if (p.topology, p.setting, p.lr) == (topology, setting, lr))
        return next(found, None)

    def within(self, settings: Collection[str]) -> Analysis:
        """What it says of some settings; chances stay corrected for all of them."""
        parts = ("places", "ranges", "same_lr", "best_lr", "costs")
        kept: dict[str, Any] = {n: tuple(p for p in getattr(self, n) if p.setting in settings) for n in parts}
        return replace(self, **kept)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def choose_metric(records: Records, wanted: str | None) -> tuple[str, bool]:
    """The metric asked for, or the held-out loss, or the first that there is; and whether more of it is better."""
    names: dict[str, bool] = {}
    for run in records.runs:
        known = ((name, run.higher_is_better(name)) for name in run.evaluation)
        names |= {name: higher for name, higher in known if higher is not None}
    if wanted is None:
        wanted = "loss" if "loss" in names or not names else next(iter(names))
    elif wanted not in names:
        raise ConfigError.unknown("--metric", wanted, names)
    return wanted, names.get(wanted, False)


def analyse(records: Records, *, metric: str | None = None, baseline: str | None = None) -> Analysis:
    """Compare every topology with the baseline, by default the first one of the runs."""
    topologies = records.topologies
    if baseline is not None and baseline not in topologies:
        raise ConfigError(f"--baseline: {baseline!r} is not among the runs; it takes one of {', '.join(topologies)}")
    (chosen, higher), base = choose_metric(records, metric), baseline or topologies[0]
    places, sign = _places(records, chosen), -1 if higher else 1
    ranges = [_range(t, s, places, sign) for s in records.groups for t in topologies]
    ranges = [found for found in ranges if found.tried]
    same, best = [], []
    for setting in records.groups:
        mine = {(p.topology, p.lr): p for p in places if p.setting == setting}
        worst = _worst(records, setting, chosen, mine.values(), sign)
        lrs = {r.topology: _rate(r, mine, worst, sign) for r in ranges if r.setting == setting}
        for topology in (t for t in topologies if t != base):
            pairs = [((topology, lr), (base, lr)) for lr in records.lrs]
            same += [
                c for one, other in pairs if (c := compare_places(mine.get(one), mine.get(other), worst)) is not None
            ]
            if topology in lrs and base in lrs:
                compared = compare_places(mine[topology, lrs[topology]], mine[base, lrs[base]], worst)
                best += [] if compared is None else [compared]
    return Analysis(
        metric=chosen,
        unit="" if (known := find_task(records.runs[0].config.task).metric(chosen)) is None else known.unit,
        higher_is_better=higher,
        baseline=base,
        confidence=CONFIDENCE,
        conditions=conditions(records, chosen),
        places=tuple(places),
        ranges=tuple(ranges),
        same_lr=corrected(same),
        best_lr=corrected(best),
        costs=tuple(costs(records, base)),
    )


def _places(records: Records, metric: str) -> list[SeedScores]:
    found: dict[tuple[str, str, float], SeedScores] = {}
    order = [(s, t, lr) for s in records.groups for t in records.topologies for lr in records.lrs]
    runs = sorted(records.runs, key=lambda r: order.index((records.setting(r), r.topology, r.lr)))
    seeds = len({run.seed for run in runs})
    for run in runs:
        key = (run.topology, records.setting(run), run.lr)
        place = found.setdefault(key, SeedScores(*key, scores={}, failed={}, of=seeds))
        score = run.score(metric)
        if score is not None and math.isfinite(score):
            place.scores[run.seed] = score
        elif score is not None:
            place.failed[run.seed] = "diverged"  # it went on to its end, and what it ended with is no number
        else:
            place.failed[run.seed] = run.state if run.state != "finished" else "not measured"
    return list(found.values())


def _worst(records: Records, setting: str, metric: str, places: Iterable[SeedScores], sign: int) -> float | None:
    """What a run that diverged counts as: no better than any that reached its end, nor than knowing nothing."""
    known = [score for place in places for score in place.scores.values()]
    if metric == "loss":
        known += [r.chance_loss for r in records.runs if records.setting(r) == setting and r.chance_loss is not None]
    return sign * max(sign * score for score in known) if known else None


def _rate(found: Range, places: Mapping[tuple[str, float], SeedScores], worst: float | None, sign: int) -> float:
    """The learning rate that a topology is compared at: its best, or where it is least lost if it is stable nowhere."""
    if found.best is not None:
        return found.best

    def loss(lr: float) -> float:
        scores = places[found.topology, lr].counted(worst).values()
        return sign * statistics.fmean(scores) if scores else math.inf

    return min(found.tried, key=loss)


def _range(topology: str, setting: str, places: Sequence[SeedScores], sign: int) -> Range:
    mine = [p for p in places if (p.topology, p.setting) == (topology, setting)]
    stable = [p for p in mine if p.stable]
    means = {p.lr: sign * p.mean for p in stable if p.mean is not None}
    best = min(means, key=means.__getitem__) if means else None
    near = [] if best is None else [lr for lr, mean in means.items() if mean <= means[best] + NEAR * abs(means[best])]
    return Range(
        topology,
        setting,
        best,
        stable=tuple(sorted(means)),
        near=tuple(sorted(near)),
        failing=tuple(sorted(p.lr for p in mine if p.failed)),
        tried=tuple(sorted(p.lr for p in mine)),
    )


def compare_places(
    one: SeedScores | None, other: SeedScores | None, worst: float | None, confidence: float = CONFIDENCE
) -> PairedComparison | None:
    """Seed by seed; None where no seed of both has a number on at least one side."""
    if one is None or other is None:
        return None
    mine, theirs = one.counted(worst), other.counted(worst)
    seeds = sorted(mine.keys() & theirs.keys())
    if not seeds or set(seeds) <= one.lost & other.lost:
        return None
    return PairedComparison(
        one.topology,
        other.topology,
        one.setting,
        one.lr,
        other.lr,
        score=statistics.fmean(mine[seed] for seed in seeds),
        baseline_score=statistics.fmean(theirs[seed] for seed in seeds),
        difference=paired([mine[seed] - theirs[seed] for seed in seeds], confidence),
        lost=len(one.lost & set(seeds)),
        baseline_lost=len(other.lost & set(seeds)),
        worst=worst if (one.lost | other.lost) & set(seeds) else None,
    )


def corrected(
    comparisons: Sequence[PairedComparison], family: int | None = None, confidence: float = CONFIDENCE
) -> tuple[PairedComparison, ...]:
    """The same with chances that allow for how many there are, or are to come: those not made yet found nothing."""
    chances = holm([c.difference.p for c in comparisons])
    known = sum(chance is not None for chance in chances)
    if family is not None and family > known:
        chances = holm([*(c.difference.p for c in comparisons), *[1.0] * (family - known)])
        known = family
    pairs = zip(comparisons, chances, strict=False)
    return tuple(replace(c, corrected_p=chance, family=known, confidence=confidence) for c, chance in pairs)
