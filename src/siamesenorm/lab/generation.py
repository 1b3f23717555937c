"""Texts that a trained language model goes on with, from a run or an exported folder, by however many processes."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from siamesenorm.errors import ConfigError
from siamesenorm.lab.inspection.source import open_folder
from siamesenorm.models.lm import Sampling, generate
from siamesenorm.models.lm.generation import before, ends_with
from siamesenorm.tasks.sharing import mixed_seed
from siamesenorm.train.inference import Inference


def continue_texts(
    folder: Path,
    texts: Sequence[str],
    place: Inference,
    *,
    tokens: int = 200,
    sampling: Sampling | None = None,
    stops: Sequence[str] = (),
    seed: int | None = None,
    batch_size: int = 64,
) -> list[str]:
    """What follows each of the texts, up to so many tokens, the end of a document or the first of the stops.

    seed: a text is drawn by it and by its own number, not by its neighbours in a batch.
    """
    if "" in stops:
        raise ConfigError("stop: an empty text is not allowed; it takes at least one character")
    found, sampling = open_folder(folder), sampling or Sampling()
    tokenizer, limit, model = found.tokenizer, found.model.config.max_length, place.ready(found.model)
    rows = [tokenizer.encode(text) or [tokenizer.eos_id] for text in texts]
    longest = max(map(len, rows))
    if longest >= limit:
        raise ConfigError(
            f"prompt: {longest} tokens are not allowed; with the answer it takes up to model.max_length = {limit}"
        )

    def answers_from(first: int) -> list[str]:
        part = rows[first : first + batch_size]
        answers = generate(
            model,
            part,
            max_new_tokens=min(tokens, limit - longest),
            temperature=sampling.temperature,
            top_k=sampling.top_k,
            top_p=sampling.top_p,
            stop_tokens=[tokenizer.eos_id],
            stop_when=ends_with(stops, tokenizer.decode),
            seed=None if seed is None else [mixed_seed(seed, first + row) for row in range(len(part))],
        )
        return [before(tokenizer.decode(answer), stops) for answer in answers]

    return [answer for part in place.each(range(0, len(rows), batch_size), answers_from) for answer in part]
