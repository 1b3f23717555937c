"""Embedded corpora as tokens in memory: something to train on with no download and no file."""

from __future__ import annotations

import functools

from siamesenorm.data.sources import embedded_documents
from siamesenorm.data.tokenizer import ByteTokenizer, Tokenizer
from siamesenorm.data.tokens import Tokens, tokens_in_memory


def embedded_tokens(
    name: str, split: str = "train", *, tokenizer: Tokenizer | None = None, seed: int = 0, validation: float = 0.05
) -> Tokens:
    """Tokens of ``python-code``, ``python-docs`` or ``arithmetic``, by default byte by byte.

    seed, validation: decide which files, topics or problems are held out.
    """
    if tokenizer is None:
        return _byte_tokens(name, split, seed, validation)
    texts = embedded_documents(name, split, seed=seed, validation=validation)
    return tokens_in_memory(texts, tokenizer, f"{name} ({split})")


@functools.lru_cache(maxsize=8)
def _byte_tokens(name: str, split: str, seed: int, validation: float) -> Tokens:
    texts = embedded_documents(name, split, seed=seed, validation=validation)
    return tokens_in_memory(texts, ByteTokenizer(), f"{name} ({split})")
