"""Log-likelihoods of continuations after their contexts, for questions with choices."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from siamesenorm.data.tokenizer import Tokenizer
from siamesenorm.errors import DataError
from siamesenorm.models.lm.generation import pad_left
from siamesenorm.tasks.sharing import Sharing

LOGITS = 2**24
"""Logits that are made at once, 64 MB of float32."""
ROWS = 256
"""Rows that are scored together at most, so that several processes have some each."""


class Likelihood(NamedTuple):
    """How likely a continuation is."""

    total: float
    """Sum of the log-probabilities of its tokens."""
    greedy: bool
    """Whether always taking the likeliest token gives it."""


def log_likelihoods(*given: Any, **more: Any) -> list[float]:
    """Sum of the log-probabilities of each continuation's tokens; takes what `likelihoods` takes."""
    return [found.total for found in likelihoods(*given, **more)]


@torch.no_grad()
def likelihoods(
    model: nn.Module,
    tokenizer: Tokenizer,
    pairs: Sequence[tuple[str, str]],
    max_length: int,
    sharing: Sharing | None = None,
) -> list[Likelihood]:
    """Likelihoods of continuations after their contexts.

    The two parts are encoded by themselves; the end-of-document token stands before a context, as in training. Of a
    context that is too long for `max_length`, the end is seen. sharing: processes that share them, in batches that
    are the same on any number of processes.
    """
    rows = [
        ([tokenizer.eos_id, *context][-max(1, max_length + 1 - len(continuation)) :], continuation)
        for context, continuation in zip(
            tokenizer.encode_batch([context for context, _ in pairs]),
            tokenizer.encode_batch([continuation for _, continuation in pairs]),
            strict=True,
        )
    ]
    longest = max((len(continuation) for _, continuation in rows), default=1)
    if longest > max_length:
        raise DataError(
            f"likelihoods: a continuation of {longest:,} tokens is not allowed; "
            f"it takes up to the model's max_length = {max_length:,}"
        )
    size = min(ROWS, max(1, LOGITS // (max(longest, 1) * tokenizer.vocab_size)))
    parts = (rows[first : first + size] for first in range(0, len(rows), size))
    shared = (sharing or Sharing()).each(parts, lambda part: score_rows(model, part))
    return [found for part in shared for found in part]


def score_rows(model: nn.Module, rows: Sequence[tuple[Sequence[int], Sequence[int]]]) -> list[Likelihood]:
    """The same for token ids. Rows end together, so only the last few places need logits."""
    device = next(model.parameters()).device
    keep = max(len(continuation) for _, continuation in rows)
    if keep == 0:
        return [Likelihood(0.0, True)] * len(rows)
    input_ids, mask = pad_left([[*context, *continuation][:-1] for context, continuation in rows], device)
    logits: Tensor = model(input_ids, attention_mask=mask, logits_to_keep=keep).logits
    log_probabilities = logits.float().log_softmax(-1)
    labels = torch.zeros(len(rows), keep, dtype=torch.long, device=device)
    counts = torch.zeros(len(rows), keep, dtype=torch.bool, device=device)
    for row, (_, continuation) in enumerate(rows):
        if continuation:
            labels[row, keep - len(continuation) :] = torch.tensor(continuation, device=device)
            counts[row, keep - len(continuation) :] = True
    chosen = log_probabilities.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    totals = chosen.where(counts, 0).sum(-1).tolist()
    greedy = ((logits.argmax(-1) == labels) | ~counts).all(-1).tolist()
    return [Likelihood(total, said) for total, said in zip(totals, greedy, strict=True)]
