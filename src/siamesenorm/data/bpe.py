"""Tokenizers of the `tokenizers` library: any tokenizer.json, and byte-level BPE trained on your text.

tokenizer = train_bpe(texts, vocab_size=8192)
save_tokenizer(tokenizer, "tokenizer.json")
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from siamesenorm.data.atomic import check_output
from siamesenorm.data.documents import Reading
from siamesenorm.data.index import check_settings
from siamesenorm.data.reading import parse_json, reason_of
from siamesenorm.data.sources import find_sources, read_documents
from siamesenorm.data.tokenizer import (
    END_OF_DOCUMENT,
    PADDING,
    TokenIds,
    fingerprint_of,
    save_tokenizer,
    token_dtype,
)
from siamesenorm.errors import DataError, import_extra

END_TOKENS = (END_OF_DOCUMENT, "<|end_of_text|>", "</s>", "<eos>", "<|eos|>", "<|im_end|>", "[SEP]")
"""Tokens taken as the end of a document where none is named, in this order."""

LONG = 1 << 22
"""Characters from which on a document is encoded in pieces, cut after a line: one text is never split among cores."""

SMALLEST_VOCABULARY = 256 + 2


class JsonTokenizer:
    """Any tokenizer.json, through `tokenizers`; its own padding, truncation and special tokens are left out."""

    def __init__(self, text: str, *, eos: str | None = None, name: str = "tokenizer.json") -> None:
        library = import_extra("tokenizers", "a tokenizer.json")
        try:
            parsed = parse_json(text, strict=False)
            self._inner = library.Tokenizer.from_str(text)
        except Exception as error:  # the library raises plain Exception
            raise DataError(
                f"tokenizer: {name!r} is not a tokenizer.json that `tokenizers` can read: {reason_of(error)}"
            ) from None
        self._inner.no_padding()
        self._inner.no_truncation()
        self._inner.encode_special_tokens = True  # text that looks like a special token stays text
        self._text = text
        self._reading: Any = None  # the same, which reads special tokens; made when it is wanted
        vocabulary: dict[str, int] = self._inner.get_vocab(with_added_tokens=True)
        found = [token for token in ([eos] if eos is not None else END_TOKENS) if token in vocabulary]
        if not found:
            tried = repr(eos) if eos is not None else f"none of {', '.join(END_TOKENS)}"
            added = parsed.get("added_tokens") or []
            special = [str(token["content"]) for token in added if token.get("special")]
            raise DataError(
                f"eos: {tried} is in the vocabulary of {name!r}; name the token that ends a document"
                + (f", such as one of {', '.join(special[:8])}" if special else "")
            )
        self.eos_token: str = found[0]
        self.eos_id: int = vocabulary[found[0]]
        self.vocab_size: int = max(vocabulary.values()) + 1

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the file and the end-of-document token."""
        return fingerprint_of(self._text, self.eos_token)

    def encode(self, text: str) -> list[int]:
        """The ids of a text, without special tokens."""
        return self.encode_batch([text])[0]

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many texts, over all cores where `tokenizers` may use them."""
        encodings = self._inner.encode_batch_fast(list(texts), add_special_tokens=False)
        return [encoding.ids for encoding in encodings]

    def encode_documents(self, texts: Sequence[str]) -> tuple[TokenIds, NDArray[np.int64]]:
        """Documents one after another, each ended by the end-of-document id, and their lengths with that id."""
        pieces = [list(cut_long(text)) for text in texts]
        encoded = iter(self.encode_batch(list(chain.from_iterable(pieces))))
        end = [self.eos_id]
        parts: list[list[int]] = []
        lengths = np.empty(len(texts), dtype=np.int64)
        for number, document in enumerate(pieces):
            ids = [next(encoded) for _ in document]
            lengths[number] = sum(map(len, ids)) + 1
            parts += [*ids, end]
        dtype = token_dtype(self.vocab_size)
        flat = np.fromiter(chain.from_iterable(parts), dtype=dtype, count=int(lengths.sum()))
        return flat, lengths

    def encode_with_special(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The ids of a text in which special tokens are written out, and the character that each begins at."""
        if self._reading is None:
            self._reading = import_extra("tokenizers", "a tokenizer.json").Tokenizer.from_str(self._text)
            self._reading.no_padding()
            self._reading.no_truncation()
        encoding = self._reading.encode(text, add_special_tokens=False)
        starts = np.array([start for start, _ in encoding.offsets], dtype=np.int64)
        return np.array(encoding.ids, dtype=np.int64), starts

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """The text of ids, special ones left out."""
        return self._inner.decode(np.asarray(ids, dtype=np.int64).tolist(), skip_special_tokens=True)

    def to_json(self) -> str:
        """The tokenizer.json as it was read."""
        return self._text


def train_bpe(texts: Iterable[str], vocab_size: int, *, progress: bool = False) -> JsonTokenizer:
    """Train a byte-level BPE: every text can be encoded, and the same texts give the same tokenizer."""
    if isinstance(vocab_size, bool) or not SMALLEST_VOCABULARY <= vocab_size <= 1 << 24:
        raise DataError.not_allowed("vocab_size", vocab_size, f"{SMALLEST_VOCABULARY} to {1 << 24}")
    library = import_extra("tokenizers", "training a BPE tokenizer")
    tokenizer = library.Tokenizer(library.models.BPE())
    tokenizer.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT, PADDING],
        initial_alphabet=sorted(library.pre_tokenizers.ByteLevel.alphabet()),
        show_progress=progress,
    )
    seen = 0

    def counted() -> Iterator[str]:
        nonlocal seen
        for text in texts:
            seen += 1
            yield from cut_long(text)

    tokenizer.train_from_iterator(counted(), trainer)
    if not seen:
        raise DataError("sources: no document to train a tokenizer on")
    return JsonTokenizer(tokenizer.to_str(pretty=True) + "\n")


def learn_tokenizer(
    sources: Sequence[str | Path],
    out: str | Path,
    *,
    vocab_size: int = 32768,
    megabytes: float = 1000.0,
    field: str = "text",
    unit: str = "file",
    invalid: str = "error",
    progress: bool = False,
    **named: Any,
) -> JsonTokenizer:
    """Train a byte-level BPE on the first megabytes of sources, and write it as a tokenizer.json.

    sources and all but out, vocab_size and progress: as `siamesenorm.data.prepare` takes them.
    """
    settings = check_settings(field=field, unit=unit, invalid=invalid)
    if not megabytes > 0:
        raise DataError.not_allowed("megabytes", megabytes, "a number above 0")
    check_output(Path(out), "out")
    found, reading = find_sources(sources, **named), Reading(settings.field, settings.unit, settings.invalid)

    def texts() -> Iterator[str]:
        left = megabytes * 1e6
        for document in read_documents(found, reading):
            yield document.text
            left -= len(document.text)
            if left <= 0:
                return

    tokenizer = train_bpe(texts(), vocab_size, progress=progress)
    save_tokenizer(tokenizer, Path(out))
    return tokenizer


def cut_long(text: str) -> Iterator[str]:
    """A text in pieces of at most `LONG` characters, cut after a line break where there is one."""
    start = 0
    while len(text) - start > LONG:
        cut = text.rfind("\n", start, start + LONG) + 1
        cut = cut if cut > start else start + LONG
        yield text[start:cut]
        start = cut
    yield text[start:]
