"""The tables of a study's page, every row of the plan in them from the beginning: what has not been run says so."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from siamesenorm.lab.study.analysis import ArmResult, LawResult, PartResult, StudyResult
from siamesenorm.lab.study.law import Speedup
from siamesenorm.lab.study.plan import LR, StudyPlan

NOT_RUN = "not yet run"
FIGURES = 3
"""Digits behind the point of a loss."""


def judged(part: PartResult, arm: ArmResult) -> bool:
    """Whether an arm and the baseline have all the fresh seeds that were planned: nothing is judged before."""
    mine, base = arm.place, part.arms[0].place
    return all(len(place.scores) + len(place.failed) == part.part.seeds for place in (mine, base))


def main_table(plan: StudyPlan, part: PartResult) -> list[str]:
    """Quality of every arm of a part, with what it cost."""
    level = f"{plan.statistics.confidence:.0%}"
    head = [
        "arm",
        f"{plan.metric}, fresh seeds",
        f"minus `{plan.baseline}` ({level}, simultaneous)",
        "chance (Holm)",
        "best rate",
        "lost in search",
        "time a step",
        "parameters",
        "memory",
    ]
    return _table(head, [_main_row(plan, part, arm) for arm in part.arms])


def _main_row(plan: StudyPlan, part: PartResult, arm: ArmResult) -> list[str]:
    if not arm.searched:
        return [f"`{arm.arm}`", NOT_RUN, *["–"] * 7]
    difference, chance = "–", "–"
    comparison = arm.comparison
    if arm.arm == plan.baseline:
        difference = "baseline"
    elif comparison is not None:
        found = comparison.difference
        difference = f"{found.mean:+.{FIGURES}f}"
        if found.low is not None and found.high is not None:
            difference += f" ({found.low:+.{FIGURES}f} to {found.high:+.{FIGURES}f})"
        if judged(part, arm):
            chance = _chance(comparison.corrected_p)
            difference = f"**{difference}**" if comparison.clear else difference
    search = f"{arm.lost} of {arm.searched}"
    if arm.searched < part.part.configurations:
        search += f" (of {part.part.configurations} planned)"
    return [
        f"`{arm.arm}`",
        _fresh(part, arm),
        difference,
        chance,
        "–" if arm.best is None or LR not in arm.best else f"{arm.best[LR]:g}",
        search,
        "–" if arm.step_ratio is None else f"{arm.step_ratio:.2f}×",
        f"{arm.parameters:,}",
        "–" if arm.memory is None else f"{arm.memory / 2**20:.0f} MiB",
    ]


def _fresh(part: PartResult, arm: ArmResult) -> str:
    count = len(arm.place.scores) + len(arm.place.failed)
    if not count:
        return NOT_RUN if arm.best is not None else "search not complete"
    text = "–" if arm.place.mean is None else f"{arm.place.mean:.{FIGURES}f}"
    if arm.place.spread is not None:
        text += f" ± {arm.place.spread:.{FIGURES}f}"
    if arm.place.failed:
        text += f", {len(arm.place.failed)} of {count} lost"
    return text if count == part.part.seeds else f"{text}, partial: {count} of {part.part.seeds} seeds"


def _chance(p: float | None) -> str:
    return "–" if p is None else "< 0.001" if p < 0.001 else f"{p:.3f}"


def not_run(part: PartResult) -> str:
    """What stands in the place of a part's table."""
    return f"{NOT_RUN[0].upper()}{NOT_RUN[1:]}: 0 of {part.of} runs."


def not_yet(result: StudyResult) -> list[str]:
    """What is cut so far, as the plan says it."""
    return [
        f"Not run so far, “{part.part.name}”: {part.part.cut}"
        for part in result.parts
        if not part.begun and part.part.cut
    ]


def tried(result: StudyResult) -> list[str]:
    """Expected best numbers by configurations tried, one table per part."""
    lines = [
        "The mean best number of k configurations over all choices of k of those tried, what diverged counted as the "
        "worst: how much tuning an arm needs.",
        "",
    ]
    for part in result.parts:
        longest = max((len(arm.best_of) for arm in part.arms), default=0)
        if not longest:
            continue
        ks = [k for k in (1, 2, 3, 4, 6, 8, 12, 16, 24, 32, 64, 128, 256) if k <= longest]
        rows = [
            [f"`{arm.arm}`", *(f"{arm.best_of[k - 1]:.{FIGURES}f}" if k <= len(arm.best_of) else "–" for k in ks)]
            for arm in part.arms
        ]
        lines += [f"{part.part.name}:", "", *_table(["arm", *(f"k = {k}" for k in ks)], rows), ""]
    return lines if len(lines) > 2 else [f"{NOT_RUN[0].upper()}{NOT_RUN[1:]}."]


def sensitivity(plan: StudyPlan, result: StudyResult) -> list[str]:
    """Learning-rate sensitivity, and the number at every rate."""
    if plan.sensitivity is None:
        return ["Not planned."]
    rates = plan.sensitivity.rates
    what = "Mean over the rates of min(loss, first loss) minus the best, other settings as the search chose: less is "
    lines = [f"{what}better." if plan.metric == "loss" else f"Of losses alone; here is {plan.metric} by rate.", ""]
    for part in result.parts:
        if not part.part.sensitivity:
            continue
        rows = []
        for arm in part.arms:
            found = "–" if arm.sensitivity is None else f"{arm.sensitivity:.{FIGURES}f}"
            cells = [_at_rate(arm, rate) for rate in rates]
            rows.append([f"`{arm.arm}`", NOT_RUN if not arm.rates else found, *cells])
        lines += [f"{part.part.name}:", "", *_table(["arm", "sensitivity", *(f"{r:g}" for r in rates)], rows), ""]
    return lines


def _at_rate(arm: ArmResult, rate: float) -> str:
    if rate not in arm.rates:
        return "–"
    score = arm.rates[rate]
    return "lost" if score is None else f"{score:.{FIGURES}f}"


def stress(plan: StudyPlan, result: StudyResult) -> list[str]:
    """Constant rates above the best."""
    if plan.stress is None:
        return ["Not planned."]
    lines = [
        "Spikes are steps whose loss lies more than 0.1 above the median of 201, per 10,000 steps behind the first "
        "hundred; at so small a batch noise alone makes some, so they count beside those of the baseline. The gradient "
        "tail is the 99.9th percentile of its norm before clipping, the activation the largest of any stream.",
        "",
    ]
    head = ["arm", "rate", plan.metric, "lost", "spikes", "gradient tail", "largest activation"]
    for part in result.parts:
        if not part.part.stress:
            continue
        rows = []
        for arm in part.arms:
            rows += [
                [
                    f"`{arm.arm}`",
                    f"{found.factor:g}×",
                    _number(found.score),
                    f"{found.lost} of {found.runs}",
                    _number(found.spikes, 0),
                    _number(found.grad_tail, 2),
                    _number(found.activation, 1),
                ]
                for found in arm.stress
            ] or [[f"`{arm.arm}`", NOT_RUN, *["–"] * 5]]
        lines += [f"{part.part.name}:", "", *_table(head, rows), ""]
    return lines


def _number(value: float | None, digits: int = FIGURES) -> str:
    return "–" if value is None or math.isnan(value) else "endless" if math.isinf(value) else f"{value:.{digits}f}"


def speedups(plan: StudyPlan, result: StudyResult) -> list[str]:
    """The baseline's laws with their errors, and what arms are worth by them."""
    if plan.metric != "loss":
        return [f"None: the law is one of losses, and {plan.metric} is none."]
    lines = [
        f"The compute that `{plan.baseline}` would need for an arm's loss by its own law "
        "L(C) = limit + scale · C^-power, C being 6 · parameters · tokens, times its processor time a step in the "
        "arm's. The interval comes from drawing seeds anew, where there are three or more everywhere; each holds "
        "alone. Times are compared on the same machine with the same versions and threads.",
        "",
    ]
    for law in result.laws:
        lines += _law(law)
    head = ["arm", "by steps", "throughput", "by time", f"{plan.statistics.confidence:.0%}"]
    for part in result.parts:
        rows = [
            [
                f"`{arm.arm}`",
                _times(arm.speedup.steps),
                _times(arm.speedup.throughput),
                _times(arm.speedup.time),
                _range(plan, arm.speedup),
            ]
            for arm in part.arms
            if arm.speedup is not None
        ]
        if rows:
            lines += ["", f"{part.part.name}:", "", *_table(head, rows)]
    return lines


def _times(value: float | None) -> str:
    return "–" if value is None else f"{_number(value, 2)}×"


def _range(plan: StudyPlan, found: Speedup) -> str:
    text = "–"
    if found.low is not None and found.high is not None:
        text = f"{_number(found.low, 2)} to {_number(found.high, 2)}"
    return f"{text} ({found.unknown} of {plan.statistics.resamples} draws unknown)" if found.unknown else text


def _law(law: LawResult) -> list[str]:
    where = f"{law.corpus}, {law.optimizer}"
    if law.law is None:
        return [f"- {where}: no law yet; it takes three sizes with all fresh seeds, there are {len(law.points)}."]
    text = f"- {where}: L(C) = {law.law.limit:.3f} + {law.law.scale:.4g} · C^-{law.law.power:.3f}"
    sizes = {compute: size for size, compute, _ in law.points}
    missed = ", ".join(f"{error:+.4f} at {sizes[compute]}" for compute, error in law.errors)
    return [f"{text}; left out of the fit, the law misses by {missed or 'an amount that takes a fourth size to know'}."]


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> list[str]:
    lines = [head, ["---"] * len(head), *rows]
    return [f"| {' | '.join(line)} |" for line in lines]
