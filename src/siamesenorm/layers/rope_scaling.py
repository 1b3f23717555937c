"""Rotary angles of models whose context was lengthened after training: linear, llama3 and yarn scaling.

Each changes how fast pairs of features rotate, as transformers has it: linear slows all by one factor
(arXiv 2306.15595), llama3 only those that rotate slowly, and yarn those too, by a ramp of its own, with an attention
factor on cosines and sines (arXiv 2309.00071).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

RopeKind = Literal["linear", "llama3", "yarn"]


@dataclass(frozen=True)
class Scaling:
    """How angles are scaled; what a kind does not know it does not look at."""

    kind: RopeKind
    factor: float
    """How much longer the context became."""
    original_length: int = 8192
    """Longest sequence before (llama3, yarn)."""
    low: float = 1.0
    """Rotations over the original length below which a pair is slowed: low_freq_factor (llama3), beta_slow (yarn)."""
    high: float = 4.0
    """Rotations from which on it is left alone: high_freq_factor (llama3), beta_fast (yarn)."""
    attention_factor: float = 1.0
    """On cosines and sines (yarn)."""
    whole_pairs: bool = True
    """Whether the ends of the ramp are whole numbers of pairs (yarn)."""

    def frequencies(self, frequencies: Tensor, theta: float) -> Tensor:
        """Angles a position, (pairs,), scaled."""
        if self.kind == "linear":
            return frequencies / self.factor
        kept = self._llama3(frequencies) if self.kind == "llama3" else self._yarn(frequencies, theta)
        return frequencies / self.factor * (1 - kept) + frequencies * kept

    def _llama3(self, frequencies: Tensor) -> Tensor:
        """How much of its own speed a pair keeps: linear in its rotations over the original length."""
        rotations = self.original_length * frequencies / (2 * math.pi)
        return ((rotations - self.low) / (self.high - self.low)).clamp(0, 1)

    def _yarn(self, frequencies: Tensor, theta: float) -> Tensor:
        """The same, linear in the pair's number."""
        width = 2 * len(frequencies)
        first, last = (self._pair(rotations, width, theta) for rotations in (self.high, self.low))
        if self.whole_pairs:
            first, last = math.floor(first), math.ceil(last)
        first, last = max(first, 0), min(last, width - 1)
        pairs = torch.arange(len(frequencies), dtype=torch.float32, device=frequencies.device)
        return 1 - ((pairs - first) / max(last - first, 0.001)).clamp(0, 1)

    def _pair(self, rotations: float, width: int, theta: float) -> float:
        """Number of the pair that rotates so often over the original length."""
        return width * math.log(self.original_length / (rotations * 2 * math.pi)) / (2 * math.log(theta))


def yarn_size(factor: float, scale: float = 1.0) -> float:
    """YaRN's own attention factor for a lengthening."""
    return 1.0 if factor <= 1 else 0.1 * scale * math.log(factor) + 1.0
