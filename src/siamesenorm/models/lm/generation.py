"""Text from a language model, one token at a time, with a cache of keys and values.

::

    generate(model, [[5, 3, 8], [7]], max_new_tokens=20)                                   # greedy
    generate(model, prompts, max_new_tokens=20, temperature=.8, top_k=50, top_p=.95, seed=0)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from siamesenorm.errors import FieldError
from siamesenorm.models.lm.model import LanguageModel


@dataclass(frozen=True)
class Sampling:
    """How the next token is chosen from its logits. Filters apply in the order temperature, top_k, top_p."""

    temperature: float = 0.0
    """0 takes the likeliest token; logits are divided by anything above."""
    top_k: int | None = None
    """Only so many likeliest tokens stay in the draw."""
    top_p: float | None = None
    """Only the likeliest tokens that together reach this probability stay in the draw."""

    def __post_init__(self) -> None:
        if not 0 <= self.temperature < math.inf:
            raise FieldError.not_allowed("temperature", self.temperature, "a number from 0")
        if self.top_k is not None and self.top_k < 1:
            raise FieldError.not_allowed("top_k", self.top_k, "a whole number from 1")
        if self.top_p is not None and not 0 < self.top_p <= 1:
            raise FieldError.not_allowed("top_p", self.top_p, "a number above 0, up to 1")

    def choose(self, logits: Tensor, generator: torch.Generator | Sequence[torch.Generator] | None = None) -> Tensor:
        """Token ids (batch,) from logits (batch, vocabulary); drawn by one generator, or by one for each row."""
        if not bool(logits.amax(-1).isfinite().all()):
            raise FieldError("logits: the model's are not finite numbers, so that no token can be chosen by them")
        if self.temperature == 0:
            return logits.argmax(-1)
        probabilities = self.probabilities(logits)
        if generator is None or isinstance(generator, torch.Generator):
            return torch.multinomial(probabilities, 1, generator=generator).squeeze(-1)
        sums = probabilities.double().cumsum(-1)
        drawn = torch.cat([torch.rand(1, generator=each, dtype=torch.float64) for each in generator]).to(sums.device)
        whole = sums[:, -1:]
        below = torch.minimum(drawn[:, None] * whole, whole.nextafter(torch.zeros_like(whole)))  # rounding is up too
        return torch.searchsorted(sums, below, right=True).squeeze(-1)

    def probabilities(self, logits: Tensor) -> Tensor:
        """What tokens are drawn from, (batch, vocabulary); sums to 1."""
        logits = logits.float()
        logits = (logits - logits.amax(-1, keepdim=True)) / self.temperature  # at most 0, however small the divisor
        if self.top_k is not None and self.top_k < logits.shape[-1]:
            smallest = logits.topk(self.top_k, dim=-1).values[:, -1:]
            logits = logits.masked_fill(logits < smallest, -torch.inf)
        if self.top_p is not None and self.top_p < 1:
            ordered, order = logits.softmax(-1).sort(dim=-1, descending=True)
            beyond = ordered.cumsum(-1) - ordered >= self.top_p  # what lies before it reaches top_p already
            logits = logits.masked_fill(torch.zeros_like(beyond).scatter(-1, order, beyond), -torch.inf)
        return logits.softmax(-1)


def generate(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]] | Tensor,
    *,
    max_new_tokens: int,
    temperature: float = 0.0,
    top_k: int | None = None,
    top_p: float | None = None,
    stop_tokens: Sequence[int] = (),
    stop_when: Callable[[list[int]], bool] | None = None,
    seed: int | Sequence[int] | None = None,
) -> list[list[int]]:
    """New tokens for each prompt, up to `max_new_tokens` or to a stop token, which is not returned.

    prompts: rows of token ids, of any length each.
    seed: rows are drawn together from one generator of this seed, so that a draw depends on the batch too; or a seed
    for each row, whose draws then depend on it alone. Greedy answers depend on nothing but the prompt.
    stop_when: asked with a row's answer after each of its tokens; the row ends where it is true.
    """
    sampling = Sampling(temperature, top_k, top_p)
    stops = frozenset(stop_tokens)
    answers: list[list[int]] = [[] for _ in prompts]
    open_rows = set(range(len(answers)))
    for tokens in stream(model, prompts, max_new_tokens=max_new_tokens, sampling=sampling, seed=seed):
        values = tokens.tolist()
        for row in list(open_rows):
            if values[row] in stops:
                open_rows.discard(row)
                continue
            answers[row].append(values[row])
            if stop_when is not None and stop_when(answers[row]):
                open_rows.discard(row)
        if not open_rows:
            break
    return answers


def ends_with(stops: Sequence[str], decode: Callable[[list[int]], str]) -> Callable[[list[int]], bool]:
    """For `stop_when`: whether one of these texts has just been completed, in however many tokens."""
    sized = [(stop, len(stop.encode())) for stop in stops if stop]  # a token is a byte at least
    return lambda answer: any(stop in decode(answer[-size:]) for stop, size in sized)


def before(text: str, stops: Sequence[str]) -> str:
    """The text before the first of the stops."""
    return text[: min((place for stop in stops if (place := text.find(stop)) >= 0), default=len(text))]


def stream(
    model: LanguageModel,
    prompts: Sequence[Sequence[int]] | Tensor,
    *,
    max_new_tokens: int,
    sampling: Sampling | None = None,
    seed: int | Sequence[int] | None = None,
) -> Iterator[Tensor]:
    """The next token of every row, (batch,), again and again; stop taking them to stop."""
    sampling = sampling or Sampling()
    device = model.embedding.weight.device
    input_ids, mask = pad_left(prompts, device)
    low, high = (int(edge) for edge in input_ids.aminmax())
    if low < 0 or high >= model.config.vocab_size:
        wrong = low if low < 0 else high
        raise FieldError(f"prompts: token {wrong} is not allowed; it takes 0 to {model.config.vocab_size - 1}")
    if max_new_tokens < 0:
        raise FieldError.not_allowed("max_new_tokens", max_new_tokens, "a whole number from 0")
    total = input_ids.shape[1] + max_new_tokens
    if total > model.config.max_length:
        raise FieldError(
            f"max_new_tokens: {max_new_tokens} after a prompt of {input_ids.shape[1]} tokens is not allowed; "
            f"both together take up to max_length = {model.config.max_length}"
        )
    generator: torch.Generator | list[torch.Generator] | None = None
    if isinstance(seed, int):
        generator = torch.Generator(device).manual_seed(seed)
    elif seed is not None:
        if len(seed) != input_ids.shape[0]:
            raise FieldError(f"seed: {len(seed)} of them for {input_ids.shape[0]} rows; it takes one for each")
        generator = [torch.Generator().manual_seed(each) for each in seed]
    was_training = model.training
    model.eval()
    try:
        cache = model.new_cache(input_ids.shape[0], total)
        for step in range(max_new_tokens):
            with torch.inference_mode():
                output = model(input_ids, attention_mask=mask if step == 0 else None, cache=cache, logits_to_keep=1)
                tokens = sampling.choose(output.logits[:, -1], generator)
                input_ids = tokens[:, None]
            yield tokens
    finally:
        model.train(was_training)


def pad_left(prompts: Sequence[Sequence[int]] | Tensor, device: torch.device) -> tuple[Tensor, Tensor | None]:
    """Token ids (batch, longest) and a mask that is 0 on the filling; no mask where nothing was filled."""
    rows = [torch.as_tensor(row, dtype=torch.long) for row in prompts]
    if not rows:
        raise FieldError("prompts: at least one row of tokens is needed")
    for index, row in enumerate(rows):
        if row.dim() != 1 or not len(row):
            raise FieldError(f"prompts: row {index} is not allowed; every row takes at least one token id")
    ids = pad_sequence(rows, batch_first=True, padding_side="left").to(device)
    if len({len(row) for row in rows}) == 1:
        return ids, None
    return ids, pad_sequence([torch.ones_like(row) for row in rows], batch_first=True, padding_side="left").to(device)
