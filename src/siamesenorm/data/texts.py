"""Text as tokens in memory: a user's own files, and the embedded corpora, to train on without preparing them first.

tokens = text_tokens("my.txt", "train", ByteTokenizer())
"""

from __future__ import annotations

import functools
import mimetypes
from pathlib import Path

from siamesenorm.data.documents import Reading
from siamesenorm.data.files import looks_like_text
from siamesenorm.data.held_out import hold_out
from siamesenorm.data.sources import ENDINGS, embedded_documents, find_sources, read_documents
from siamesenorm.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer
from siamesenorm.data.tokens import ARRAYS, Tokens, tokens_in_memory
from siamesenorm.errors import DataError

LARGEST = 1 << 26
"""Bytes of text that are tokenised anew at every start."""
HELD_OUT = 0.05
"""Share of a text that is held out, as of the embedded corpora."""


def is_text(path: Path) -> bool:
    """Whether a file, or what a folder holds, is text and not arrays of tokens."""
    if path.is_dir():
        return not any(path.rglob("*.npy")) and any(is_text(file) for file in path.rglob("*") if file.is_file())
    if not path.is_file() or path.suffix in ARRAYS:
        return False
    kind = mimetypes.guess_type(path.name)[0] or ""
    return kind.startswith("text/") or bool({".gz", *ENDINGS} & set(path.suffixes)) or looks_like_text(path)


def text_tokens(name: str, split: str | None, tokenizer: str = "byte") -> Tokens:
    """Tokens of a text file, or of a folder of them, in one split, or all where this is None.

    tokenizer: byte, or the path of a tokenizer.json.
    """
    sources = find_sources([name])
    size = sum(source.size() for source in sources)
    if size > LARGEST:
        raise DataError(
            f"data: {name!r} is text of {size:,} bytes; up to {LARGEST:,} are tokenised as they are, more takes "
            f"siamesenorm data prepare {name} -o FOLDER, and then the folder"
        )
    return _tokens(name, split, tokenizer, "".join(source.sha256() for source in sources))


@functools.lru_cache(maxsize=8)
def _tokens(name: str, split: str | None, tokenizer: str, sha256: str) -> Tokens:
    """Kept from one run to the next in the same process, as long as the text is the same."""
    sources, chosen = find_sources([name]), load_tokenizer(tokenizer)
    reading = hold_out(sources, Reading(validation=0.0 if split is None else HELD_OUT), chosen)
    texts = [
        document.text
        for document in read_documents(sources, reading)
        if document.split == (split or "train") and document.text.strip()
    ]
    title = name if split is None else f"{name} ({split})"
    return tokens_in_memory(texts, chosen, title) if texts else Tokens.encoded(chosen, [], title)


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
