"""Perplexity of a causal LM on any text, in windows that overlap so that every token has a past."""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from statistics import stdev
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from siamesenorm.errors import InteropError
from siamesenorm.tasks.sharing import Sharing


@dataclass(frozen=True)
class TextScore:
    """What a model says about a text; every figure follows from the sum of its losses."""

    nats: float
    """Sum of the losses of all scored tokens."""
    tokens: int
    """Scored tokens."""
    utf8_bytes: int
    """Bytes of the text those tokens stand for."""
    words: int
    """Pieces between white space, as the harness counts them."""
    windows: int
    stderr: float | None
    """Standard error of the loss per token over windows; None for a single one."""

    @property
    def nats_per_token(self) -> float:
        """The mean loss."""
        return self.nats / self.tokens

    @property
    def token_perplexity(self) -> float:
        """exp(nats per token)."""
        return _exp(self.nats_per_token)

    @property
    def word_perplexity(self) -> float:
        """exp(nats per word); comparable between tokenizers."""
        return _exp(self.nats / self.words)

    @property
    def byte_perplexity(self) -> float:
        """exp(nats per byte); comparable between tokenizers."""
        return _exp(self.nats / self.utf8_bytes)

    @property
    def bits_per_byte(self) -> float:
        """Base-2 loss per byte; comparable between tokenizers."""
        return self.nats / self.utf8_bytes / math.log(2)


class Window(NamedTuple):
    """Tokens ``start`` to ``stop`` are read; of what they predict, the last `scored` have not been scored before."""

    start: int
    stop: int
    scored: int


def check_stride(length: int, stride: int | None) -> int:
    """How far windows of `length` tokens move: as given, where that is possible, or by half of them."""
    if stride is not None and not 1 <= stride <= length:
        raise InteropError.not_allowed("stride", stride, f"a number from 1 to the window's {length}")
    return stride or max(length // 2, 1)


def windows_over(predictions: int, length: int, stride: int) -> Iterator[Window]:
    """Windows of `length` tokens, each moved by `stride`, that score every one of `predictions` exactly once.

    The last one is moved back to be as long as the others: its past is longer, and all fit into a batch.
    """
    done = 0
    while done < predictions:
        stop = min(max(done + stride, length), predictions)
        yield Window(max(0, stop - length), stop, stop - done)
        done = stop


@torch.inference_mode()
def score_text(
    model: Any,
    tokenizer: Any,
    text: str,
    *,
    window: int,
    stride: int | None = None,
    batch_size: int = 8,
    progress: Callable[[int, int], None] | None = None,
    sharing: Sharing | None = None,
) -> TextScore:
    """The loss of a causal LM of transformers on a text.

    window: tokens that are read at once, the model's longest sequence at most.
    stride: new tokens a window, half of it by default: each then sees at least half a window of past.
    progress: called with windows done and windows in all. sharing: processes that share the windows, batch by batch.
    The first token is predicted from the tokenizer's bos or eos token; without either it is not scored.
    """
    ids = tokenizer(text, add_special_tokens=False, verbose=False)["input_ids"]
    first = tokenizer.bos_token_id if tokenizer.bos_token_id is not None else tokenizer.eos_token_id
    size = len(text.encode())
    if first is not None:
        ids = [first, *ids]
    elif ids:
        size -= len(tokenizer.decode(ids[:1]).encode())
    if len(ids) < 2:
        raise InteropError("text: it has no token that could be scored")
    tokens = torch.tensor(ids)
    plan = list(windows_over(len(ids) - 1, window, check_stride(window, stride)))
    losses: list[float] = []
    parts = (plan[start : start + batch_size] for start in range(0, len(plan), batch_size))
    for found in (sharing or Sharing()).each(parts, lambda part: _losses(model, tokens, part)):
        losses += found
        if progress is not None:
            progress(len(losses), len(plan))
    each = [loss / part.scored for loss, part in zip(losses, plan, strict=True)]
    return TextScore(
        nats=math.fsum(losses),
        tokens=len(ids) - 1,
        utf8_bytes=max(size, 1),
        words=len(re.split(r"\s+", text)),
        windows=len(plan),
        stderr=stdev(each) / math.sqrt(len(each)) if len(each) > 1 else None,
    )


def _losses(model: Any, tokens: Tensor, batch: list[Window]) -> list[float]:
    """The sum of each window's new losses."""
    rows = torch.stack([tokens[part.start : part.stop + 1] for part in batch]).to(model.device)
    logits = model(input_ids=rows[:, :-1], use_cache=False).logits
    found = F.cross_entropy(logits.float().transpose(1, 2), rows[:, 1:], reduction="none").double()
    return [float(row[row.shape[0] - part.scored :].sum()) for row, part in zip(found, batch, strict=True)]


def _exp(value: float) -> float:
    try:
        return math.exp(value)
    except OverflowError:
        return math.inf
