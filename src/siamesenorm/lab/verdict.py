"""The answer in sentences: is it better, how far can the learning rate go, what does it cost."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from siamesenorm.lab.statistics import Analysis, Comparison, Cost, Range
from siamesenorm.lab.student import Interval

SLOWER = 0.03
"""Differences in time or memory below this share are not worth a word."""


def verdict(analysis: Analysis) -> list[str]:
    """Sentences, the most wanted first."""
    settings = list(dict.fromkeys(c.setting for c in analysis.best_lr))
    wanted = sorted(analysis.best_lr, key=lambda c: (settings.index(c.setting), not c.difference.clear))
    sentences = [_compared(analysis, comparison) for comparison in wanted]
    sentences += [_nowhere(found) for found in analysis.ranges if found.best is None]
    sentences += _noise(analysis)
    sentences += _rates(analysis)
    sentences += [text for cost in analysis.costs if (text := _cost(analysis, cost))]
    if len(analysis.best_lr) > 1 and len(analysis.seeds) > 1:
        sentences.append(
            f"Every interval is a {analysis.confidence:.0%} one for itself, and best learning rates were chosen "
            "from the same runs; settle a close call with seeds of its own."
        )
    return sentences


def _compared(analysis: Analysis, c: Comparison) -> str:
    unit = " nats" if analysis.metric == "loss" else ""
    better = (c.difference.mean > 0) == analysis.higher_is_better
    size, rates = f"{abs(c.difference.mean):.4g}{unit}", _rates_of(c)
    scores = f"{c.score:.4g} against {c.baseline_score:.4g}"
    if c.difference.low is None:
        side = "better" if better else "worse"
        return f"{_where(c.setting)}{c.topology} ends {size} {side} than {c.baseline} ({scores}), {rates}, in one seed."
    interval = f"{analysis.confidence:.0%} interval {interval_text(c.difference)}, {c.difference.count} seeds"
    if c.difference.clear and c.difference.high is not None:
        low, high = sorted(map(abs, (c.difference.low, c.difference.high)))  # of the size that the sentence says
        interval = f"{analysis.confidence:.0%} interval {low:.4f} to {high:.4f}, {c.difference.count} seeds"
    if not c.difference.clear:
        return (
            f"{_where(c.setting)}{c.topology} and {c.baseline} cannot be told apart: {scores}, {rates}; difference "
            f"{c.difference.mean:+.4f}{unit} ({interval})."
        )
    side = "better" if better else "worse"
    return f"{_where(c.setting)}{c.topology} is {side} than {c.baseline} by {size} ({interval}): {scores}, {rates}."


def short(c: Comparison, analysis: Analysis) -> str:
    """``0.297 better than pre``, in a few words."""
    if c.difference.low is not None and not c.difference.clear:
        return f"cannot be told from {c.baseline}"
    side = "better" if (c.difference.mean > 0) == analysis.higher_is_better else "worse"
    return f"{abs(c.difference.mean):.3f} {side} than {c.baseline}" + ("" if c.difference.clear else " in one seed")


def interval_text(interval: Interval) -> str:
    """``−0.092 to −0.070``."""
    return "unknown" if interval.low is None else f"{interval.low:+.4f} to {interval.high:+.4f}"


def _rates_of(c: Comparison) -> str:
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
