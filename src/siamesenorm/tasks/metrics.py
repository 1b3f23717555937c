"""What a held-out number is: which way is better, what it is measured on, and how much of that it takes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import NDArray

from siamesenorm.data.held_out import LEAST as LEAST_TOKENS

LEAST = {"tokens": LEAST_TOKENS, "images": 100, "samples": 100, "questions": 100, "documents": 100}
"""Fewer than these do not tell two models apart: a share of 100 has an error of 5 %."""
DECIDED_BY = {
    "tokens": "evaluation.sequences, and how much text is held out",
    "images": "evaluation.images, and how many are held out",
    "samples": "evaluation.samples",
    "questions": "evaluation.arithmetic",
    "documents": "evaluation.lm_eval",
}
"""What decides how many there are."""


FREQUENCY_TOKENS = 2**18
"""Tokens that frequencies are counted over."""


@dataclass(frozen=True)
class Metric:
    """One held-out number that a task gives."""

    higher: bool | None
    """Whether more is better; None: it is no number to compare by, such as an error bar."""
    of: str
    """What it is a mean over: one of `LEAST`."""
    unit: str = ""
    """Of its numbers, where they have one."""


Metrics = Mapping[str, Metric]
"""By name."""

HARNESS = {
    **dict.fromkeys(("acc", "acc_all", "acc_bytes", "acc_mutual_info", "acc_norm", "bleu", "chrf", "chrf++"), True),
    **dict.fromkeys(("em", "exact_match", "f1", "likelihood", "mcc", "rouge1", "rouge2", "rougeL"), True),
    **dict.fromkeys(("bits_per_byte", "brier_score", "byte_perplexity", "perplexity", "ter", "word_perplexity"), False),
}
"""Which way metrics of the lm-evaluation-harness point; of others a run records what the harness says."""


def entropy(shares: NDArray[Any]) -> float:
    """Nats of a distribution, or of counts, which are divided by their sum."""
    shares = shares[shares > 0] / shares.sum()
    return float(-(shares * np.log(shares)).sum())


def harness_metric(name: str) -> Metric:
    """Of ``lm_eval/TASK/METRIC``, or ``lm_eval/TASK/METRIC (FILTER)``."""
    return Metric(HARNESS.get(plain_metric(name)), "documents")


def plain_metric(name: str) -> str:
    """``acc`` of ``lm_eval/piqa/acc (first)``."""
    return name.rpartition("/")[2].partition(" (")[0]
