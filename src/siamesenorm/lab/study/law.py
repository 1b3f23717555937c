"""The baseline's law of compute, and what an arm's loss is worth by it: L(C) = limit + scale · C^-power.

law = fit_law(compute=[1e12, 4e12, 2e13], loss=[2.4, 2.2, 2.0])
law.needed(2.1) / 1e13              # how much longer the baseline takes to get there
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
FEWEST = 3
"""Sizes that a law of three numbers takes."""
SEEDS = 3
"""Of every size and of the pairs: fewer drawn anew say nothing of their spread."""
COARSE, FINE, ROUNDS = 200, 40, 4
"""Limits that are tried, and how often the best one's surroundings are."""
HIGHEST = 1 - 1e-6
"""Of the lowest loss: a limit lies below it."""


@dataclass(frozen=True)
class Law:
    """How the baseline's loss falls with compute."""

    limit: float
    scale: float
    power: float

    def loss(self, compute: float) -> float:
        """What so much compute gives."""
        return self.limit + self.scale * compute**-self.power

    def needed(self, loss: float) -> float:
        """The compute that a loss takes; endless at the limit and below."""
        return math.inf if loss <= self.limit else ((loss - self.limit) / self.scale) ** (-1 / self.power)


def fit_law(compute: Sequence[float], loss: Sequence[float]) -> Law | None:
    """The law nearest to some points; None where there are too few, or losses do not fall with compute."""
    if len({*compute}) < FEWEST:
        return None
    limit, scale, power = (float(found[0]) for found in fit_laws(np.asarray(compute), np.asarray([loss])))
    return Law(limit, scale, power) if power > 0 and math.isfinite(scale) else None


def fit_laws(compute: Floats, losses: Floats) -> tuple[Floats, Floats, Floats]:
    """Limits, scales and powers of many sets of losses (sets, points) at the same compute.

    For a limit the rest is a straight line in logarithms; the limit is the one whose squared errors of loss are least.
    """
    middle = np.exp(np.log(compute).mean())
    x = np.log(compute / middle)
    lowest = losses.min(1)
    shares = np.broadcast_to(np.linspace(0, HIGHEST, COARSE), (len(losses), COARSE))
    width = 1 / COARSE
    for _ in range(ROUNDS):
        limits = shares * lowest[:, None]
        logs = np.log(np.maximum(losses[:, None, :] - limits[..., None], 1e-300))
        slope = ((logs - logs.mean(-1, keepdims=True)) * x).sum(-1) / (x**2).sum()
        level = logs.mean(-1)
        fitted = limits[..., None] + np.exp(level[..., None] + slope[..., None] * x)
        errors = ((fitted - losses[:, None, :]) ** 2).sum(-1)
        best = errors.argmin(1)
        rows = np.arange(len(losses))
        found = limits[rows, best], level[rows, best], slope[rows, best]
        around = np.linspace(-width, width, FINE)
        shares = np.clip(shares[rows, best][:, None] + around, 0, HIGHEST)
        width *= 2 / FINE
    limit, level, slope = found
    return limit, np.exp(level) * middle**-slope, -slope


@dataclass(frozen=True)
class Speedup:
    """How much sooner an arm reaches its loss than the baseline would: by steps, by time, and with its interval."""

    steps: float
    """Compute that the baseline needs for the arm's loss, in that of its own runs; infinite beyond the law's limit."""
    throughput: float | None
    """The baseline's processor time a step in the arm's; None where no machine ran both."""
    time: float | None
    low: float | None
    """Of the time; None with fewer than three seeds anywhere, and where the bound lies among unknown draws."""
    high: float | None
    unknown: int = 0
    """Draws of seeds whose law does not fall: their speed-up may be anything."""


def speedup(
    points: Sequence[tuple[float, Sequence[float]]],
    at: float,
    differences: Sequence[float],
    throughput: float | None,
    *,
    resamples: int,
    confidence: float,
    seed: int = 0,
) -> Speedup | None:
    """An arm's effective speed-up; the interval comes from drawing seeds anew, of the law's points and of the pairs.

    points: the baseline's compute and its losses, seed by seed, at every size.
    at: the baseline's compute where the arm is compared. differences: arm minus baseline, pair by pair.
    """
    compute = np.array([found for found, _ in points])
    law = fit_law(list(compute), [float(np.mean(losses)) for _, losses in points])
    if law is None:
        return None
    steps = law.needed(law.loss(at) + float(np.mean(differences))) / at
    time = None if throughput is None else steps * throughput
    if throughput is None or min(len(differences), *(len(losses) for _, losses in points)) < SEEDS:
        return Speedup(steps, throughput, time, None, None)
    chance = np.random.default_rng(seed)

    def drawn(values: Sequence[float]) -> Floats:
        return np.asarray(values)[chance.integers(len(values), size=(resamples, len(values)))].mean(1)

    limit, scale, power = fit_laws(compute, np.stack([drawn(losses) for _, losses in points], 1))
    loss = limit + scale * at**-power + drawn(differences)
    with np.errstate(all="ignore"):
        needed = np.where(loss > limit, ((loss - limit) / scale) ** (-1 / power), np.inf) / at
    known = np.sort(needed[(power > 0) & ~np.isnan(needed)]) * throughput
    unknown = resamples - len(known)
    # an unknown draw lies below every other for the lower bound, and above for the upper one
    cut = round((1 - confidence) / 2 * (resamples - 1))
    low = float(known[cut - unknown]) if cut >= unknown else None
    high = float(known[resamples - 1 - cut]) if cut >= unknown else None
    return Speedup(steps, throughput, time, low, high, unknown)


def left_out(points: Sequence[tuple[float, Sequence[float]]]) -> list[tuple[float, float]]:
    """Of every point, its compute and how far the law of the others is from its loss; nothing with too few."""
    found = []
    means = [(compute, float(np.mean(losses))) for compute, losses in points]
    for number, (compute, loss) in enumerate(means):
        others = means[:number] + means[number + 1 :]
        law = fit_law([c for c, _ in others], [value for _, value in others])
        if law is not None:
            found.append((compute, law.loss(compute) - loss))
    return found
