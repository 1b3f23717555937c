"""What of a text is held out: a share of its size, at least as much as can be measured on, long documents in parts.

reading = hold_out(find_sources(["book.txt"]), Reading(validation=0.05), tokenizer)
for part in split_document(document, reading): part.split, part.text

A part goes by a hash of its text: copies never lie on both sides, and neither order nor number of workers matters. The
hash is compared with a bound. In large sources the share itself is a good one. In small ones a hash would draw too few
documents to come near the share, often none or all, so the bound is searched for: parts are taken in the order of
their hashes until enough is held out.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import replace

from siamesenorm.data.documents import Document, Reading, Source, choose_split, unit_hash
from siamesenorm.data.tokenizer import Tokenizer

LEAST = 4096
"""Tokens that a loss must be measured on to mean something: bytes spread by 1.6 nats, their mean then by .03."""
AIM = LEAST + LEAST // 4
"""Tokens that are held out at least, where the text allows it: some may end up not being scored."""
MOST = 0.25
"""Share beyond which that least is not insisted on: the rest is to be learnt from."""
NEEDED = math.ceil(AIM / MOST)
"""Tokens of a text of which enough can be held out."""
PARTS = 16
"""What is held out comes from so many places at least: a document longer than such a part of it is cut."""
SHORTEST = 256
"""Characters of a part."""
SMALL = 1 << 24
"""Bytes of sources up to which the bound is searched for."""
SAMPLE = 1 << 16
"""Characters that tell how many bytes a token has."""


def hold_out(sources: Sequence[Source], reading: Reading, tokenizer: Tokenizer) -> Reading:
    """The same reading with the bound and the length of parts that hold out its share of these sources.

    A share of 0 holds out nothing. The result is a function of the sources, the tokenizer and the reading alone.
    """
    if not reading.validation:
        return reading
    size = sum(source.size() for source in sources)
    documents = _small(sources, reading) if size <= SMALL else None
    if documents is None:
        share = min(max(reading.validation, AIM / size), max(reading.validation, MOST))
        return replace(reading, validation=share, longest=max(SHORTEST, int(share * size / PARTS)))
    total = sum(_bytes(document.text) for document in documents)
    most = max((1 + 1 / PARTS) * reading.validation, MOST) * total
    wanted = min(max(reading.validation * total, AIM * _bytes_of_token(documents, tokenizer)), most)
    cut = replace(reading, longest=max(SHORTEST, int(wanted / PARTS)))
    return replace(cut, validation=_bound(documents, cut, tokenizer, reading.validation * total, most))


def split_document(document: Document, reading: Reading) -> Iterator[Document]:
    """A document with its split; a long one in stretches that lie on one side."""
    if document.split is not None:
        yield document
        return
    held: list[str] = []
    side, start, place = "", 0, 0
    for part in parts_of(document.text, reading.longest):
        # blank lines have no side of their own
        own = side if side and not part.strip() else choose_split(part.encode(), reading.seed, reading.validation)
        if held and own != side:
            yield _stretch(document, "".join(held), start, side)
            held, start = [], place
        held.append(part)
        side, place = own, place + len(part)
    yield _stretch(document, "".join(held), start, side)


def parts_of(text: str, longest: int | None) -> Iterator[str]:
    """A text in parts of so many bytes at most, about: cut behind a paragraph, a line or a word where there is one."""
    if longest is None or len(text) <= longest // 4 or (size := _bytes(text)) <= longest:
        yield text
        return
    length, start = max(1, longest * len(text) // size), 0
    while len(text) - start > length:
        end = start + length
        for mark in ("\n\n", "\n", " "):
            if (found := text.rfind(mark, start + length // 2, end)) >= 0:
                end = found + len(mark)
                break
        yield text[start:end]
        start = end
    yield text[start:]


def _stretch(document: Document, text: str, start: int, split: str) -> Document:
    """Part of a document from a character on, or all of it."""
    whole = len(text) == len(document.text)
    return Document(text, document.place if whole else f"{document.place}:{start}", split)


def _small(sources: Sequence[Source], reading: Reading) -> list[Document] | None:
    """Every document with text, or None if there is more of it than the sources' sizes say, as in packed ones."""
    found: list[Document] = []
    read, skipped = 0, Counter[str]()
    for source in sources:
        for piece in source.pieces(1 << 40, reading):
            for document in source.read(piece, reading, skipped):
                read += len(document.text)
                if read > 4 * SMALL:
                    return None
                if document.text.strip():
                    found.append(document)
    return found


def _bound(documents: Sequence[Document], reading: Reading, tokenizer: Tokenizer, wanted: float, most: float) -> float:
    """The hash below which parts of so many bytes and of `AIM` tokens lie, as far as `most` bytes allow it."""
    parts: dict[float, list[str]] = defaultdict(list)
    size = tokens = 0
    for document in documents:
        if document.split is None:
            for part in parts_of(document.text, reading.longest):
                if part.strip():
                    parts[unit_hash(part.encode(), reading.seed)].append(part)
        elif document.split == "validation":
            size, tokens = size + _bytes(document.text), tokens + len(tokenizer.encode(document.text))
    bound = 0.0
    for number in sorted(parts):
        more = sum(map(_bytes, parts[number]))
        if (size >= wanted and tokens >= AIM) or size + more > most:
            break
        size, tokens = size + more, tokens + sum(map(len, tokenizer.encode_batch(parts[number])))
        bound = math.nextafter(number, 2.0)
    return bound


def _bytes_of_token(documents: Sequence[Document], tokenizer: Tokenizer) -> float:
    """Of the first texts."""
    text = ""
    for document in documents:
        text += document.text[: SAMPLE - len(text)]
        if len(text) >= SAMPLE:
            break
    return _bytes(text) / max(1, len(tokenizer.encode(text)))


def _bytes(text: str) -> int:
    return len(text) if text.isascii() else len(text.encode())
