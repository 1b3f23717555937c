"""The learning rate as a pure function of the step: nothing to save, nothing to restore.

With s the 1-based step, S all steps, w the warm-up and f the final share of the peak:

    warm-up    s / w                                        s <= w
    cosine     f + (1 - f) (1 + cos(pi p)) / 2              p = (s - w) / (S - w)
    wsd        1, then 1 - (1 - f) q                        q = (s - S + d) / d over the last d = decay · S steps
    constant   1
"""

from __future__ import annotations

import math

from siamesenorm.errors import ConfigError
from siamesenorm.train.config import ScheduleConfig


def lr_factor(config: ScheduleConfig, step: int, steps: int) -> float:
    """The learning rate of a 1-based step, as a share of its peak."""
    if not 1 <= step <= steps:
        raise ConfigError.not_allowed("step", step, f"1 to {steps}")
    if step <= config.warmup:
        return step / config.warmup
    if config.kind == "cosine":
        progress = (step - config.warmup) / (steps - config.warmup)
        return config.final + (1 - config.final) * (1 + math.cos(math.pi * progress)) / 2
    if config.kind == "wsd":
        decay = decay_steps(config, steps)
        return 1 - (1 - config.final) * max(0, step - (steps - decay)) / decay
    return 1.0


def decay_steps(config: ScheduleConfig, steps: int) -> int:
    """How many of the last steps wsd decays in."""
    return min(max(1, round(config.decay * steps)), steps - config.warmup)


def steady_until(config: ScheduleConfig, steps: int) -> float:
    """The last step whose learning rate, like all before it, would be the same in a longer run."""
    if config.kind == "cosine":
        return config.warmup
    return math.inf if config.kind == "constant" else steps - decay_steps(config, steps)
