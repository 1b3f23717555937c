"""The answer in sentences: is it better, how far can the learning rate go, what does it cost, what does it stand on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from siamesenorm.lab.report.cost import Cost
from siamesenorm.lab.report.statistics import Analysis, PairedComparison, Range
from siamesenorm.lab.report.student import Interval

SLOWER = 0.03
"""Differences in time or memory below this share are not worth a word."""
SURE = 1e-4
"""Chances below this are not told apart."""


def verdict(analysis: Analysis) -> list[str]:
    """Sentences, the most wanted first; none on who is better where too little was held out to tell."""
    settings = list(dict.fromkeys(c.setting for c in analysis.best_lr))
    wanted = sorted(analysis.best_lr, key=lambda c: (settings.index(c.setting), not c.clear))
    sentences = _too_small(analysis) or [_compared(analysis, comparison) for comparison in wanted]
    sentences += _same(analysis)
    sentences += [_nowhere(found) for found in analysis.ranges if found.best is None]
    sentences += _noise(analysis)
    sentences += _rates(analysis)
    sentences += [text for cost in analysis.costs if (text := _cost(analysis, cost))]
    return [*sentences, *_chosen(analysis), analysis.conditions.sentence()]


def _same(analysis: Analysis) -> list[str]:
    """Topologies whose runs cannot be told apart at all: what was trained did not depend on them."""
    by_topology: dict[str, dict[tuple[str, float], dict[int, float]]] = {}
    for place in analysis.places:
        by_topology.setdefault(place.topology, {})[place.setting, place.lr] = place.scores
    baseline = by_topology.get(analysis.baseline, {})
    return [
        f"Every run of {topology} ended with the very number of {analysis.baseline}'s: the model does not seem to "
        "depend on the topology that it is given."
        for topology, scores in by_topology.items()
        if topology != analysis.baseline and scores == baseline and any(scores.values())
    ]


def _too_small(analysis: Analysis) -> list[str]:
    """In place of a verdict, where it would mean nothing."""
    found = analysis.conditions
    if not found.too_small:
        return []
    return [
        f"No verdict: {found.sizes[0]:,} held-out {found.of} are too few to tell topologies apart; "
        f"it takes {found.least:,} or more."
    ]


def _compared(analysis: Analysis, c: PairedComparison) -> str:
    unit = f" {analysis.unit}" if analysis.unit else ""
    side = "better" if (c.difference.mean > 0) == analysis.higher_is_better else "worse"
    size, rates, where = f"{abs(c.difference.mean):.4g}{unit}", _rates_of(analysis, c), _where(c.setting)
    scores = f"{c.score:#.4g} against {c.baseline_score:#.4g}"
    if c.difference.low is None or c.difference.high is None:
        return f"{where}{c.topology} ends {size} {side} than {c.baseline} ({scores}), {rates}, in one seed{_lost(c)}."
    interval = interval_text(c.difference)
    if c.clear and c.difference.low * c.difference.high > 0:
        low, high = sorted(map(abs, (c.difference.low, c.difference.high)))  # of the size that the sentence says
        interval = f"{low:.4f} to {high:.4f}"
    facts = f"{analysis.confidence:.0%} interval {interval}, {c.difference.count} seeds, {chance_text(c)}"
    if c.clear:
        return f"{where}{c.topology} is {side} than {c.baseline} by {size} ({facts}): {scores}, {rates}{_lost(c)}."
    if c.lost > c.baseline_lost:
        return (
            f"{where}{c.topology} diverged in {c.lost} of {c.difference.count} seeds, {c.baseline} in "
            f"{c.baseline_lost or 'none'}; with {c.worst:.4g}, the worst, for such a run it ends {size} {side} "
            f"({scores}, {rates}), which may be chance ({facts})."
        )
    return (
        f"{where}{c.topology} and {c.baseline} cannot be told apart: {scores}, {rates}; difference "
        f"{c.difference.mean:+.4f}{unit} ({facts}){_lost(c)}."
    )


def chance_text(c: PairedComparison) -> str:
    """``p = 0.012 corrected for 3 comparisons``."""
    if c.corrected_p is None:
        return "p unknown"
    p = f"p < {SURE:g}" if c.corrected_p < SURE else f"p = {c.corrected_p:.2g}"
    return p if c.family == 1 else f"{p} corrected for {c.family} comparisons"


def _lost(c: PairedComparison) -> str:
    """Which seeds count as the worst."""
    counts = {c.topology: c.lost, c.baseline: c.baseline_lost}
    parts = [f"{name} diverged in {lost} of {c.difference.count}" for name, lost in counts.items() if lost]
    return f"; {' and '.join(parts)}, which counts as {c.worst:.4g}, the worst" if parts else ""


def in_few_words(c: PairedComparison, analysis: Analysis) -> str:
    """``0.297 better than pre``, in a few words."""
    if analysis.conditions.too_small:
        return "too little was held out to tell"
    if c.difference.low is not None and not c.clear:
        lost = f"diverged in {c.lost} of {c.difference.count}" if c.lost > c.baseline_lost else ""
        return lost or f"cannot be told from {c.baseline}"
    side = "better" if (c.difference.mean > 0) == analysis.higher_is_better else "worse"
    return f"{abs(c.difference.mean):.3f} {side} than {c.baseline}" + ("" if c.clear else " in one seed")


def interval_text(interval: Interval) -> str:
    """``−0.092 to −0.070``."""
    return "unknown" if interval.low is None else f"{interval.low:+.4f} to {interval.high:+.4f}"


def _rates_of(analysis: Analysis, c: PairedComparison) -> str:
    best = {r.topology: r.best for r in analysis.ranges if r.setting == c.setting}
    if best.get(c.topology) is None or best.get(c.baseline) is None:
        return f"both at {c.lr:g}" if c.lr == c.baseline_lr else f"at {c.lr:g} and {c.baseline_lr:g}"
    if c.lr == c.baseline_lr:
        return f"both at their best learning rate {c.lr:g}"
    return f"each at its best learning rate ({c.lr:g} and {c.baseline_lr:g})"


def _where(setting: str) -> str:
    return f"{setting}: " if setting else ""


def _nowhere(found: Range) -> str:
    return f"{_where(found.setting)}{found.topology} was stable at none of {_list(found.tried)}."


def _noise(analysis: Analysis) -> list[str]:
    counts = [c.difference.count for c in analysis.best_lr]
    if not counts or min(counts) > 1:
        return []
    return ["One seed cannot tell an effect from noise: run it with --seeds 0,1,2 for intervals."]


def _chosen(analysis: Analysis) -> list[str]:
    """What selection does to the numbers, wherever something was selected."""
    compared = {(c.setting, name) for c in analysis.best_lr for name in (c.topology, c.baseline)}
    several = [r for r in analysis.ranges if (r.setting, r.topology) in compared and len(r.tried) > 1]
    if not several:
        return []
    return [
        "Best learning rates were chosen from the same runs that are compared at them, which flatters whoever has the "
        "noisier runs or more rates to choose from; settle a close call with new seeds at these rates."
    ]


def _rates(analysis: Analysis) -> list[str]:
    """How far each topology's learning rate went."""
    sentences = []
    for r in analysis.ranges:
        if len(r.tried) < 2 or r.best is None:
            continue
        if not r.failing:
            reach = f"was stable at every learning rate tried, {r.tried[0]:g} to {r.tried[-1]:g}"
        else:
            places = (analysis.place(r.topology, r.setting, lr) for lr in r.failing)
            counts = [
                f"{p.lr:g} ({_ends(p.failed.values())} in {len(p.failed)} of {len(p.failed) + len(p.scores)})"
                for p in places
                if p is not None
            ]
            reach = f"was stable at {_list(r.stable)}, and not at {', '.join(counts)}"
        edge = "; its best is the highest tried, so a higher one may do better" if r.best == r.tried[-1] else ""
        sentences.append(f"{_where(r.setting)}{r.topology} {reach}; best {r.best:g}{edge}.")
    return sentences


def _ends(states: Iterable[str]) -> str:
    return " or ".join(sorted(set(states)))


def _list(lrs: Sequence[float]) -> str:
    return ", ".join(f"{lr:g}" for lr in lrs) if lrs else "no learning rate"


def _cost(analysis: Analysis, cost: Cost) -> str | None:
    if cost.topology == analysis.baseline:
        return None
    parts = []
    ratio, what = cost.processor_ratio, "processor time"
    if ratio is None:
        ratio, what = cost.step_ratio, "time"
    if ratio is not None:
        parts.append(f"{_percent(ratio)} {what} a step" if abs(ratio - 1) >= SLOWER else f"the same {what} a step")
    if cost.memory_ratio is not None:
        same = abs(cost.memory_ratio - 1) < SLOWER
        parts.append("the same memory" if same else f"{_percent(cost.memory_ratio)} memory")
    if not parts:
        return None
    return f"{_where(cost.setting)}Against {analysis.baseline}, {cost.topology} takes {' and '.join(parts)}."


def _percent(ratio: float) -> str:
    return f"{abs(ratio - 1):.0%} {'more' if ratio > 1 else 'less'}"
