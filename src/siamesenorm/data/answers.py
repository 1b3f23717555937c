"""Examples as packed sequences whose answers are learnt: whole examples side by side, never one across two sequences.

tokens = answer_tokens("chat.jsonl", "train", sequence_length=512)
TrainingData(tokens, 512, document_masking=True)

Examples are put together so that little room is left (best fit, long ones first), and what is left is filled with
end-of-text tokens that nobody scores. One that is longer than a sequence is cut at its end, or left out where nothing
of its answers would be left. Held out are examples by a hash of their prompt: copies never lie on both sides.
"""

from __future__ import annotations

import bisect
import functools
import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from siamesenorm.data.chat import Encoded, conversation_encoder
from siamesenorm.data.documents import unit_hash
from siamesenorm.data.examples import ASSISTANT, Example, read_examples
from siamesenorm.data.held_out import AIM, MOST
from siamesenorm.data.sources import find_sources
from siamesenorm.data.texts import HELD_OUT
from siamesenorm.data.tokenizer import Tokenizer, load_tokenizer, token_dtype
from siamesenorm.data.tokens import SCORED, STARTS, Tokens
from siamesenorm.errors import DataError

LARGEST = 1 << 29
"""Bytes of examples that are tokenised at every start."""


@dataclass(frozen=True)
class Fitted:
    """An example as it stands in a sequence, and the hash that decides its side."""

    tokens: Encoded
    number: float

    @property
    def answers(self) -> int:
        """Tokens that are learnt."""
        return int(self.tokens.scored.sum())


def answer_tokens(
    name: str, split: str | None, tokenizer: str = "byte", template: str = "auto", *, sequence_length: int
) -> Tokens:
    """The packed examples of a JSONL file, or of a folder of them, in one split, or all where this is None.

    tokenizer: byte, a tokenizer.json or a folder with one. template: see `siamesenorm.data.chat`.
    """
    sources = find_sources([name])
    size = sum(source.size() for source in sources)
    if size > LARGEST:
        raise DataError(f"data: {name!r} has {size:,} bytes of examples; it takes up to {LARGEST:,} in one corpus")
    digest = "".join(source.sha256() for source in sources)
    return _tokens(name, split, tokenizer, template, sequence_length, digest)


@functools.lru_cache(maxsize=8)
def _tokens(name: str, split: str | None, tokenizer: str, template: str, length: int, sha256: str) -> Tokens:
    fitted, cut, left_out = _fitted(name, tokenizer, template, length, sha256)
    bound = 0.0 if split is None else _bound(fitted)
    held_out = split == "validation"
    chosen = [example for example in fitted if (example.number < bound) == held_out]
    title = name if split is None else f"{name} ({split})"
    tokens, share = pack(chosen, length, load_tokenizer(tokenizer), title)
    said = f"{title}: {len(chosen):,} examples in {len(tokens) // length:,} sequences, {share:.0%} of them filled"
    if (cut or left_out) and not held_out:
        said += f"; of all, longer than {length} tokens: {cut:,} cut, {left_out:,} left out"
    tokens.note = said
    return tokens


@functools.lru_cache(maxsize=2)
def _fitted(name: str, tokenizer: str, template: str, length: int, sha256: str) -> tuple[list[Fitted], int, int]:
    """Examples that fit into a sequence; how many were cut for it, and how many left out."""
    encode = conversation_encoder(tokenizer, template)
    dtype = token_dtype(load_tokenizer(tokenizer).vocab_size)
    found: list[Fitted] = []
    cut = left_out = 0
    for example in read_examples(name):
        ids, scored = encode(example)
        scored[0] = False  # it has nothing to be predicted from
        long = len(ids) > length
        if not scored[:length].any():
            left_out += 1
            continue
        cut += long
        kept = Encoded(ids[:length].astype(dtype), scored[:length])
        found.append(Fitted(kept, unit_hash(_prompt(example).encode(), 0)))
    if not found:
        what = f"all {left_out:,} have no answer in their first {length} tokens" if left_out else "it is empty"
        raise DataError(f"data: {name!r} holds no example to learn from: {what}")
    return found, cut, left_out


def _prompt(example: Example) -> str:
    """What stands before the first answer; all of it where nothing does."""
    before = []
    for message in example.messages:
        if message.role == ASSISTANT:
            break
        before.append(message.content)
    return "\0".join(before) if "".join(before).strip() else "\0".join(m.content for m in example.messages)


def _bound(examples: Sequence[Fitted]) -> float:
    """The hash below which examples are held out: their share of answers, at least what a loss can be measured on."""
    by_hash: dict[float, int] = defaultdict(int)
    for example in examples:
        by_hash[example.number] += example.answers
    total = sum(by_hash.values())
    held, bound = 0, 0.0
    for number in sorted(by_hash):
        if held >= max(HELD_OUT * total, AIM) or held + by_hash[number] > MOST * total:
            break
        held += by_hash[number]
        bound = math.nextafter(number, 2.0)
    return bound


def pack(examples: Sequence[Fitted], length: int, tokenizer: Tokenizer, name: str) -> tuple[Tokens, float]:
    """Whole examples in sequences of a length, and the share of these that is no filling."""
    sequences = best_fit([len(example.tokens.ids) for example in examples], length)
    # a sequence reads one token beyond its end, which here is never scored
    count = len(sequences) * length + 1 if sequences else 0
    ids = np.full(count, tokenizer.eos_id, dtype=token_dtype(tokenizer.vocab_size))
    marks = np.full(count, STARTS, dtype=np.uint8)
    filled = 0
    for row, members in enumerate(sequences):
        at = row * length
        for member in members:
            own = examples[member].tokens
            ids[at : at + len(own.ids)] = own.ids
            marks[at : at + len(own.ids)] = own.scored * np.uint8(SCORED)
            marks[at] |= STARTS
            at += len(own.ids)
        filled += at - row * length
    return Tokens.encoded(tokenizer, [ids], name, marks=marks), filled / max(1, count - 1)


def best_fit(sizes: Sequence[int], room: int) -> list[list[int]]:
    """Which items go together into places of a size: each, the largest first, where least room is left over."""
    places: list[list[int]] = []
    open_places: dict[int, list[int]] = defaultdict(list)
    rooms: list[int] = []
    """Rooms that some place has left, ascending."""
    order: NDArray[np.int64] = np.argsort(-np.asarray(sizes, dtype=np.int64), kind="stable")
    for item in order.tolist():
        found = bisect.bisect_left(rooms, sizes[item])
        if found == len(rooms):
            place, left = len(places), room
            places.append([])
        else:
            left = rooms[found]
            place = open_places[left].pop()
            if not open_places[left]:
                del rooms[found]
        places[place].append(item)
        left -= sizes[item]
        if left and not open_places[left]:
            bisect.insort(rooms, left)
        if left:
            open_places[left].append(place)
    return places
