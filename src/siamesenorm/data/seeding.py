"""Random draws that depend on a seed and a number alone, and the generators of three libraries seeded for a while."""

from __future__ import annotations

import contextlib
import random
from collections.abc import Iterator

import numpy as np
import torch

MIXER, TOP = 0x9E3779B97F4A7C15, 2**63


def mixed(seed: int, number: int) -> int:
    """A seed for one of many draws."""
    return (seed * MIXER + number) % TOP


@contextlib.contextmanager
def seeded(seed: int, *, gpus: bool = True) -> Iterator[None]:
    """Global generators of random, numpy and torch seeded inside, and put back as they were behind it.

    gpus: whether those of GPUs are too.
    """
    states = random.getstate(), np.random.get_state()
    with torch.random.fork_rng(devices=None if gpus else []):
        (torch.manual_seed if gpus else torch.default_generator.manual_seed)(seed % TOP)
        random.seed(seed)
        np.random.seed(seed % 2**32)
        try:
            yield
        finally:
            random.setstate(states[0])
            np.random.set_state(states[1])
