"""What a grid says: paired differences with confidence intervals, stable learning rates, cost, and a verdict."""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from siamesenorm.lab.records import HIGHER_IS_BETTER, Records, Run
from siamesenorm.lab.student import CONFIDENCE, Interval, paired
from siamesenorm.train.errors import ConfigError

NEAR = 0.02
"""A learning rate is near the best where the metric is within this share of it."""
BESIDE = ("accuracy", "frechet")


@dataclass(frozen=True)
class Place:
    """The seeds of one topology at one learning rate."""

    topology: str
    setting: str
    lr: float
    scores: dict[int, float]
    """By seed, of runs that reached their end."""
    failed: dict[int, str]
    """By seed, how the others ended: diverged or stuck."""

    @property
    def stable(self) -> bool:
        """Whether every seed reached its end."""
        return bool(self.scores) and not self.failed

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
class Comparison:
    """A topology against the baseline, seed by seed; negative differences are better for losses."""

    topology: str
    baseline: str
    setting: str
    lr: float
    baseline_lr: float
    score: float
    baseline_score: float
    difference: Interval


@dataclass(frozen=True)
class Cost:
    """What a topology took, the median over its runs, and against the baseline."""

    topology: str
    setting: str
    step_seconds: float | None
    processor_seconds: float | None
    """Per step, with evaluation and start."""
    memory_bytes: float | None
    """Above the idle process."""
    step_ratio: float | None = None
    processor_ratio: float | None = None
    memory_ratio: float | None = None


@dataclass(frozen=True)
class Analysis:
    """Everything that a report says of its runs."""

    metric: str
    baseline: str
    confidence: float
    seeds: tuple[int, ...]
    places: tuple[Place, ...]
    ranges: tuple[Range, ...]
    same_lr: tuple[Comparison, ...]
    """At every learning rate that both took."""
    best_lr: tuple[Comparison, ...]
    """Each at its own best learning rate."""
    costs: tuple[Cost, ...]

    @property
    def higher_is_better(self) -> bool:
        """Which way the metric points."""
        return is_higher_better(self.metric)

    def place(self, topology: str, setting: str, lr: float) -> Place | None:
        """The seeds of one topology at one learning rate, if there are any."""
        found = (p for p in self.places if (p.topology, p.setting, p.lr) == (topology, setting, lr))
        return next(found, None)

    def as_dict(self) -> dict[str, Any]:
        """Plain data."""
        return asdict(self)


def is_higher_better(metric: str) -> bool:
    """Whether more is better, as of accuracies."""
    return metric.partition("/")[0] in HIGHER_IS_BETTER


def choose_metric(records: Records, wanted: str | None) -> str:
    """The metric asked for, or the held-out loss, or the first that there is."""
    names = dict.fromkeys(name for run in records.runs for name in run.evaluation)
    if wanted is not None:
        if wanted not in names:
            raise ConfigError(f"--metric: {wanted!r} is not known; it takes one of {', '.join(names) or 'none'}")
        return wanted
    return "loss" if "loss" in names or not names else next(iter(names))


def beside(records: Records, analysis: Analysis) -> list[Analysis]:
    """The same of what people ask for beside the metric that decides: accuracy, where runs have it."""
    measured = {name for run in records.runs for name in run.evaluation}
    wanted = [name for name in BESIDE if name in measured and name != analysis.metric]
    return [analyse(records, metric=name, baseline=analysis.baseline) for name in wanted]


def analyse(records: Records, *, metric: str | None = None, baseline: str | None = None) -> Analysis:
    """Compare every topology with the baseline, by default the first one of the runs."""
    topologies = records.topologies
    if baseline is not None and baseline not in topologies:
        raise ConfigError(f"--baseline: {baseline!r} is not among the runs; it takes one of {', '.join(topologies)}")
    chosen, base = choose_metric(records, metric), baseline or topologies[0]
    places = _places(records, chosen)
    ranges = [_range(t, s, places, chosen) for s in records.groups for t in topologies]
    ranges = [found for found in ranges if found.tried]
    same, best = [], []
    for setting in records.groups:
        mine = [p for p in places if p.setting == setting]
        for topology in (t for t in topologies if t != base):
            same += [c for lr in records.lrs if (c := _compare(mine, topology, base, lr, lr)) is not None]
            lrs = {r.topology: r.best for r in ranges if r.setting == setting}
            one, other = lrs.get(topology), lrs.get(base)
            if one is not None and other is not None and (c := _compare(mine, topology, base, one, other)) is not None:
                best.append(c)
    return Analysis(
        metric=chosen,
        baseline=base,
        confidence=CONFIDENCE,
        seeds=tuple(records.seeds),
        places=tuple(places),
        ranges=tuple(ranges),
        same_lr=tuple(same),
        best_lr=tuple(best),
        costs=tuple(_costs(records, base)),
    )


def _places(records: Records, metric: str) -> list[Place]:
    found: dict[tuple[str, str, float], Place] = {}
    order = [(s, t, lr) for s in records.groups for t in records.topologies for lr in records.lrs]
    runs = sorted(records.runs, key=lambda r: order.index((records.setting(r), r.topology, r.lr)))
    for run in runs:
        key = (run.topology, records.setting(run), run.lr)
        place = found.setdefault(key, Place(*key, scores={}, failed={}))
        score = run.score(metric)
        if score is not None:
            place.scores[run.seed] = score
        else:
            place.failed[run.seed] = run.state if run.state != "finished" else "not measured"
    return list(found.values())


def _range(topology: str, setting: str, places: Sequence[Place], metric: str) -> Range:
    mine = [p for p in places if (p.topology, p.setting) == (topology, setting)]
    stable = [p for p in mine if p.stable]
    sign = -1 if is_higher_better(metric) else 1
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


def _compare(places: Sequence[Place], topology: str, baseline: str, lr: float, baseline_lr: float) -> Comparison | None:
    one = next((p for p in places if (p.topology, p.lr) == (topology, lr)), None)
    other = next((p for p in places if (p.topology, p.lr) == (baseline, baseline_lr)), None)
    if one is None or other is None:
        return None
    seeds = sorted(one.scores.keys() & other.scores.keys())
    if not seeds:
        return None
    return Comparison(
        topology,
        baseline,
        one.setting,
        lr,
        baseline_lr,
        score=statistics.fmean(one.scores[seed] for seed in seeds),
        baseline_score=statistics.fmean(other.scores[seed] for seed in seeds),
        difference=paired([one.scores[seed] - other.scores[seed] for seed in seeds]),
    )


def _costs(records: Records, baseline: str) -> list[Cost]:
    costs = []
    for setting in records.groups:
        base = _cost(records, baseline, setting)
        for topology in records.topologies:
            cost = _cost(records, topology, setting)
            if cost is None:
                continue
            costs.append(
                Cost(
                    topology,
                    setting,
                    cost[0],
                    cost[1],
                    cost[2],
                    *(_ratio(mine, theirs) for mine, theirs in zip(cost, base or (None,) * 3, strict=True)),
                )
            )
    return costs


def _cost(records: Records, topology: str, setting: str) -> tuple[float | None, float | None, float | None] | None:
    """Medians of step time, processor time a step, and memory."""
    runs = [r for r in records.runs if (r.topology, records.setting(r)) == (topology, setting)]
    if not runs:
        return None
    return (
        _median([r.step_seconds for r in runs]),
        _median([_processor(r) for r in runs]),
        _median([_memory(r) for r in runs]),
    )


def _processor(run: Run) -> float | None:
    """Seconds a step; a run that ended early has spent too much of them on its start."""
    seconds = run.facts.get("processor_seconds")
    return seconds / run.step if seconds and run.step == run.config.steps else None


def _memory(run: Run) -> float | None:
    return run.facts.get("memory_bytes") or None


def _median(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.median(known) if known else None


def _ratio(mine: float | None, theirs: float | None) -> float | None:
    return None if mine is None or not theirs else mine / theirs
