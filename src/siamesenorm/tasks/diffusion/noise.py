"""Times and noise of samples, each a function of a seed and the sample's number alone.

Nothing is drawn one after another: a run resumes at any sample with the same noise, at any number of processes.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def draw(seed: int, samples: NDArray[np.int64], shape: tuple[int, ...]) -> dict[str, Tensor]:
    """``time`` (batch,) in [0, 1) and ``noise`` (batch, *shape) for samples by their numbers."""
    times = np.empty(len(samples), dtype=np.float64)
    noise = np.empty((len(samples), *shape), dtype=np.float32)
    for place, number in enumerate(samples):
        generator = np.random.Generator(np.random.Philox(key=seed, counter=[0, 0, 0, int(number)]))
        times[place] = generator.random()
        generator.standard_normal(out=noise[place], dtype=np.float32)
    return {"time": torch.from_numpy(times), "noise": torch.from_numpy(noise)}
