"""Student's t: quantiles, and the interval of a mean of paired differences; Holm's correction for many of them.

paired([-0.035, -0.029, -0.038])  ->  mean -0.034, from -0.045 to -0.023 (95 %)
"""

from __future__ import annotations

import functools
import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass

CONFIDENCE = 0.95


@dataclass(frozen=True)
class Interval:
    """The mean of some differences, and where it would lie for ever more of them."""

    mean: float
    low: float | None
    """None with fewer than two differences: one cannot tell noise from effect."""
    high: float | None
    deviation: float | None
    """Standard deviation of one difference."""
    count: int

    @property
    def p(self) -> float | None:
        """How often chance alone gives a mean this far from zero or farther; None with fewer than two differences."""
        if self.deviation is None:
            return None
        if not self.deviation:
            return 0.0 if self.mean else 1.0
        return 1 - between(self.mean / self.deviation * math.sqrt(self.count), self.count - 1)


def paired(differences: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Mean and confidence interval of differences between pairs, by Student's t."""
    mean = statistics.fmean(differences)
    if len(differences) < 2:
        return Interval(mean, None, None, None, len(differences))
    deviation = statistics.stdev(differences)
    reach = quantile((1 + confidence) / 2, len(differences) - 1) * deviation / math.sqrt(len(differences))
    return Interval(mean, mean - reach, mean + reach, deviation, len(differences))


def holm(chances: Sequence[float | None]) -> list[float | None]:
    """Chances of many comparisons, corrected so that one in twenty *families* of them has a false find below .05.

    Holm (1979): the smallest times their number, the next times one less, none below the one before.
    """
    known = sorted((chance, place) for place, chance in enumerate(chances) if chance is not None)
    corrected: list[float | None] = [None] * len(chances)
    highest = 0.0
    for rank, (chance, place) in enumerate(known):
        highest = max(highest, min(1.0, (len(known) - rank) * chance))
        corrected[place] = highest
    return corrected


@functools.lru_cache(maxsize=1024)
def quantile(probability: float, freedom: int) -> float:
    """The t below which so much of the distribution lies."""
    if not 0 < probability < 1 or freedom < 1:
        raise ValueError(
            f"probability = {probability}, freedom = {freedom} is not allowed; it takes (0, 1) and 1 or more"
        )
    if probability < 0.5:
        return -quantile(1 - probability, freedom)
    low, high = 0.0, 1.0
    while cumulative(high, freedom) < probability:
        high *= 2
    for _ in range(200):
        middle = (low + high) / 2
        low, high = (middle, high) if cumulative(middle, freedom) < probability else (low, middle)
    return (low + high) / 2


def cumulative(t: float, freedom: int) -> float:
    """How much of Student's t distribution lies below t."""
    return 0.5 + math.copysign(between(t, freedom), t) / 2


def between(t: float, freedom: int) -> float:
    """How much of it lies between -t and t: a finite sum, as degrees of freedom are whole (Abramowitz, Stegun 26.7)."""
    angle, odd = math.atan(abs(t) / math.sqrt(freedom)), freedom % 2
    term = total = math.cos(angle) * (freedom > 1) if odd else 1.0
    for place in range(2 + odd, freedom - 1, 2):
        term *= (place - 1) / place * math.cos(angle) ** 2
        total += term
    found = math.sin(angle) * total
    return min(1.0, (angle + found) * 2 / math.pi if odd else found)
