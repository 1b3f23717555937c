"""What the records of a study say, part by part: nothing is dropped, and what diverged counts as the worst.

result = analyse_study(study)
result.parts[0].arms[1].comparison.difference
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from siamesenorm.lab.report.statistics import WORST, PairedComparison, SeedScores, compare_places, corrected
from siamesenorm.lab.study.cells import StudyCell, cells_of, counts_of, winner
from siamesenorm.lab.study.law import Law, Speedup, fit_law, left_out, speedup
from siamesenorm.lab.study.plan import LR, PlanFile, StudyPart, StudyPlan
from siamesenorm.lab.study.record import Record, placed

FLOPS = 6
"""Of training, a parameter and token."""


@dataclass(frozen=True)
class Stressed:
    """Runs of an arm at a constant rate above its best."""

    factor: float
    runs: int
    lost: int
    """That diverged or got stuck."""
    score: float | None
    """Mean, with the worst for those that are lost."""
    spikes: float | None
    """Per 10,000 steps, mean over all of them."""
    grad_tail: float | None
    activation: float | None
    """Largest, of runs that reached their end."""


@dataclass(frozen=True)
class ArmResult:
    """What is known of an arm in a part."""

    arm: str
    topology: str
    searched: int
    """Configurations with a record."""
    lost: int
    """Of these, those that diverged or got stuck."""
    best: dict[str, Any] | None
    """The winner's drawn fields, once the search is complete."""
    best_of: tuple[float, ...]
    """Expected best number after 1, 2, … configurations."""
    place: SeedScores
    """Fresh seeds."""
    comparison: PairedComparison | None = None
    sensitivity: float | None = None
    rates: dict[float, float | None] = field(default_factory=dict)
    """The number at each learning rate; None where it was lost."""
    stress: tuple[Stressed, ...] = ()
    parameters: int = 0
    step_costs: dict[str, float] = field(default_factory=dict)
    """Processor seconds per step, median, by machine, versions and threads; what ran last comes last."""
    step_ratio: float | None = None
    """Against the baseline's on the same machine with the same versions and threads; None where they share none."""
    memory: float | None = None
    speedup: Speedup | None = None


@dataclass(frozen=True)
class PartResult:
    """What is known of a part."""

    part: StudyPart
    done: int
    of: int
    worst: float | None
    """What a lost run counts as."""
    higher: bool
    """Whether more of the metric is better."""
    arms: tuple[ArmResult, ...]
    compute: float | None = None
    """FLOPs of a run of the baseline, once a fresh seed of it has reached its end."""

    @property
    def begun(self) -> bool:
        """Whether there is a record of it."""
        return self.done > 0

    def arm(self, name: str) -> ArmResult:
        """The result of an arm."""
        return next(found for found in self.arms if found.arm == name)


@dataclass(frozen=True)
class LawResult:
    """The baseline's law on a corpus under an optimiser."""

    corpus: str
    optimizer: str
    law: Law | None
    points: tuple[tuple[str, float, tuple[float, ...]], ...]
    """Size, compute and losses by seed."""
    errors: tuple[tuple[float, float], ...]
    """Of every size left out of the fit: compute, and predicted minus measured loss."""


@dataclass(frozen=True)
class StudyResult:
    """Everything that the page says."""

    parts: tuple[PartResult, ...]
    laws: tuple[LawResult, ...]

    def as_dict(self) -> dict[str, Any]:
        """Plain data; what is endless is the word."""
        return dict(_plain(asdict(self)))


def analyse_study(file: PlanFile, records: Mapping[str, Record]) -> StudyResult:
    """Every figure of the plan that its records allow."""
    plan = file.plan
    parts = [analyse_part(file, part, records) for part in plan.parts]
    laws = _laws(plan, parts)
    parts = [_with_speedups(plan, part, laws) for part in parts]
    return StudyResult(tuple(parts), tuple(laws.values()))


def analyse_part(file: PlanFile, part: StudyPart, records: Mapping[str, Record]) -> PartResult:
    """Search, fresh seeds, sensitivity, stress and cost of every arm of a part."""
    plan = file.plan
    cells = cells_of(file, part, records)
    known = [placed(records[cell.key], cell) for cell in cells if cell.key in records]
    # rates that were chosen to be too low or too high say nothing of how bad a tuned run can be
    worst = worst_of([record for record in known if record.stage in ("search", "fresh")], plan.metric)
    names = plan.arms_of(part)
    best = {arm: winner([c for c in cells if (c.arm, c.stage) == (arm, "search")], records) for arm in names}
    arms = [_arm(plan, arm, best[arm], [record for record in known if record.arm == arm], worst) for arm in names]
    compared = compared_with_baseline(plan, arms, worst)
    base = arms[0].step_costs
    found = [
        replace(arm, comparison=compared.get(arm.arm), step_ratio=step_ratio(arm.step_costs, base)) for arm in arms
    ]
    higher = any(record.higher for record in known)
    of = sum(counts_of(file, part).values())
    return PartResult(part, len(known), of, worst, higher, tuple(found), _compute(plan, known))


def step_ratio(costs: Mapping[str, float], base: Mapping[str, float]) -> float | None:
    """An arm's time a step in the baseline's, of the last machine, versions and threads that both ran with."""
    ratios = [cost / base[machine] for machine, cost in costs.items() if base.get(machine)]
    return ratios[-1] if ratios else None


def worst_of(records: Iterable[Record], metric: str) -> float | None:
    """What a lost run counts as: no better than any that reached its end, nor than knowing nothing of the input."""
    records = list(records)
    known = [record.score for record in records if record.score is not None]
    if metric == "loss":
        known += [record.chance for record in records if record.chance is not None]
    if not known:
        return None
    return min(known) if any(record.higher for record in records) else max(known)


def _arm(plan: StudyPlan, arm: str, best: StudyCell | None, every: Sequence[Record], worst: float | None) -> ArmResult:
    by_stage: dict[str, list[Record]] = {}
    for record in every:
        by_stage.setdefault(record.stage, []).append(record)
    search = by_stage.get("search", [])
    at = {record.lr: record for record in by_stage.get("sensitivity", [])}
    wanted = () if plan.sensitivity is None else plan.sensitivity.rates
    tried = [at[rate] for rate in wanted if rate in at]
    costs: dict[str, list[float]] = {}
    for record in sorted(every, key=lambda record: record.when):
        if record.step_cost is not None:  # what ran last comes last
            costs[record.timed_on] = [*costs.pop(record.timed_on, []), record.step_cost]
    return ArmResult(
        arm=arm,
        topology=plan.arms[arm],
        searched=len(search),
        lost=sum(record.state in WORST for record in search),
        best=None if best is None else best.drawn,
        best_of=expected_best([_counted(r, worst) for r in search], higher=any(r.higher for r in search)),
        place=SeedScores(
            arm,
            "",
            math.nan if best is None else float(best.drawn.get(LR, best.lr)),
            scores={r.seed: r.score for r in by_stage.get("fresh", []) if r.score is not None},
            failed={r.seed: r.state for r in by_stage.get("fresh", []) if r.score is None},
        ),
        sensitivity=sensitivity_of(tried, plan.metric) if wanted and len(tried) == len(wanted) else None,
        rates={record.lr: record.score for record in tried},
        stress=tuple(_stressed(by_stage.get("stress", []), worst)),
        parameters=max((record.parameters for record in every), default=0),
        step_costs={machine: statistics.median(found) for machine, found in costs.items()},
        memory=statistics.median([r.memory_bytes for r in every if r.memory_bytes] or [0.0]) or None,
    )


def _counted(record: Record, worst: float | None) -> float:
    score = record.score if record.score is not None else worst
    return math.nan if score is None else score


def expected_best(scores: Sequence[float], *, higher: bool = False) -> tuple[float, ...]:
    """The mean best of k of the scores, over all choices of k of them, for every k."""
    ordered = sorted(scores, reverse=higher)
    count = len(ordered)
    # the best of k is number i (from 0) where the other k - 1 come from behind it
    return tuple(
        sum(score * math.comb(count - 1 - i, k - 1) for i, score in enumerate(ordered)) / math.comb(count, k)
        for k in range(1, count + 1)
    )


def sensitivity_of(records: Sequence[Record], metric: str) -> float | None:
    """Mean over rates of min(loss, first loss) - best loss (arXiv 2309.14322); a lost run has its first loss.

    Of losses alone: no other metric has the first loss for its level.
    """
    if metric != "loss" or any(record.higher or record.first_loss is None for record in records):
        return None
    first = max(record.first_loss or 0.0 for record in records)
    losses = [first if record.score is None else min(record.score, first) for record in records]
    return statistics.fmean(losses) - min(losses)


def _stressed(records: Sequence[Record], worst: float | None) -> Iterable[Stressed]:
    for factor in sorted({record.factor for record in records if record.factor is not None}):
        runs = [record for record in records if record.factor == factor]
        yield Stressed(
            factor,
            len(runs),
            sum(record.state in WORST for record in runs),
            statistics.fmean(_counted(record, worst) for record in runs),
            _mean([record.spikes for record in runs]),
            max((record.grad_tail for record in runs if record.grad_tail is not None), default=None),
            max((record.activation for record in runs if record.activation is not None), default=None),
        )


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return statistics.fmean(known) if known else None


def compared_with_baseline(
    plan: StudyPlan, arms: Sequence[ArmResult], worst: float | None
) -> dict[str, PairedComparison]:
    """Arms against the baseline, seed by seed, corrected for all that the part is to compare."""
    family = max(1, len(arms) - 1)
    level = plan.statistics.confidence
    confidence = 1 - (1 - level) / family
    pairs = [(arm, compare_places(arm.place, arms[0].place, worst, confidence)) for arm in arms[1:]]
    found = [(arm.arm, compared) for arm, compared in pairs if compared is not None]
    return dict(zip([name for name, _ in found], corrected([c for _, c in found], family, level), strict=True))


def _laws(plan: StudyPlan, parts: Sequence[PartResult]) -> dict[tuple[str, str], LawResult]:
    """The baseline's law on every corpus under every optimiser, from parts whose fresh seeds are complete.

    Of losses alone: no other metric falls by such a law.
    """
    found: dict[tuple[str, str], LawResult] = {}
    if plan.metric != "loss":
        return found
    for key in dict.fromkeys((part.part.corpus, part.part.optimizer) for part in parts):
        points = []
        for result in parts:
            part = result.part
            scores = result.arms[0].place.scores
            complete = result.compute is not None and len(scores) == part.seeds
            if (part.corpus, part.optimizer) == key and complete:
                points.append((part.size, result.compute or math.nan, tuple(scores.values())))
        points.sort(key=lambda point: point[1])
        plain = [(compute, losses) for _, compute, losses in points]
        law = fit_law([compute for compute, _ in plain], [statistics.fmean(losses) for _, losses in plain])
        found[key] = LawResult(*key, law, tuple(points), tuple(left_out(plain)))
    return found


def _compute(plan: StudyPlan, records: Sequence[Record]) -> float | None:
    """FLOPs of a baseline's run, by the records of a part's cells."""
    runs = (r for r in records if r.arm == plan.baseline and r.stage == "fresh" and r.score is not None)
    return next((float(FLOPS * run.parameters * run.samples) for run in runs), None)


def _with_speedups(plan: StudyPlan, result: PartResult, laws: Mapping[tuple[str, str], LawResult]) -> PartResult:
    law = laws.get((result.part.corpus, result.part.optimizer))
    if law is None or law.law is None:
        return result
    at = {size: compute for size, compute, _ in law.points}.get(result.part.size)
    if at is None:
        return result
    points = [(compute, losses) for _, compute, losses in law.points]
    base = result.arms[0].place.counted(result.worst)
    arms = []
    for arm in result.arms:
        mine = arm.place.counted(result.worst)
        complete = len(mine) == result.part.seeds == len(base)
        if arm.arm != plan.baseline and complete:
            differences = [mine[seed] - base[seed] for seed in sorted(mine.keys() & base.keys())]
            rule = plan.statistics
            throughput = 1 / arm.step_ratio if arm.step_ratio else None
            found = speedup(points, at, differences, throughput, resamples=rule.resamples, confidence=rule.confidence)
            arm = replace(arm, speedup=found)
        arms.append(arm)
    return replace(result, arms=tuple(arms))


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return None if math.isnan(value) else "endless"
    if hasattr(value, "model_dump"):
        return value.model_dump(mode="json")
    return value
