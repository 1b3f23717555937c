"""Tokenizers as transformers knows them: the byte tokenizer, and those that come as a tokenizer.json."""

from __future__ import annotations

import json
from typing import Protocol

from tokenizers import Tokenizer
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from siamesenorm.data.reading import parse_json
from siamesenorm.data.tokenizer import PADDING, ByteTokenizer
from siamesenorm.errors import InteropError

BYTES = 256


class HasTokenizerJson(Protocol):
    """A tokenizer that can be written down as a tokenizer.json, as those of `siamesenorm.data`."""

    @property
    def eos_token(self) -> str:
        """What ends a document."""

    def to_json(self) -> str:
        """The tokenizer.json."""


def byte_tokenizer(vocab_size: int = ByteTokenizer.vocab_size) -> PreTrainedTokenizerFast:
    """Ids 0 to 255 are bytes, 256 ends a document, 257 is padding; a vocabulary of 256 has the bytes alone.

    Every text comes back from its ids, and special tokens are never read out of a text.
    """
    if vocab_size < BYTES:
        raise InteropError.refused("vocab_size", vocab_size, f"bytes take at least {BYTES}")
    ours = ByteTokenizer()
    if vocab_size >= ours.vocab_size:
        return as_fast(ours.to_json(), ours.eos_token)
    plain = parse_json(ours.to_json())
    plain["added_tokens"] = []
    plain["model"]["vocab"] = {sign: byte for sign, byte in plain["model"]["vocab"].items() if byte < BYTES}
    return as_fast(json.dumps(plain), None)


def for_transformers(
    tokenizer: PreTrainedTokenizerBase | HasTokenizerJson | str, vocab_size: int, chat_template: str | None = None
) -> PreTrainedTokenizerBase:
    """A tokenizer of transformers from its own, from ours, or from the word ``byte``; it must fit `vocab_size`.

    chat_template: what conversations are written by; special tokens are then read out of texts.
    """
    if tokenizer == "byte":
        made = byte_tokenizer(vocab_size)
    elif isinstance(tokenizer, PreTrainedTokenizerBase):
        made = tokenizer
    elif not isinstance(tokenizer, str) and hasattr(tokenizer, "to_json"):
        made = as_fast(tokenizer.to_json(), tokenizer.eos_token)
    else:
        raise InteropError(f"tokenizer: {tokenizer!r} is not known; it takes byte, or a tokenizer of transformers")
    if len(made) > vocab_size:
        raise InteropError(f"tokenizer: it has {len(made)} tokens, more than the model's vocab_size = {vocab_size}")
    if chat_template is not None:
        made.chat_template, made.split_special_tokens = chat_template, False
    return made


def as_fast(text: str, eos_token: str | None) -> PreTrainedTokenizerFast:
    """A tokenizer.json for decoder-only models: filled up on the left, no special token read out of a text."""
    tokenizer = Tokenizer.from_str(text)
    names = {} if eos_token is None else {"eos_token": eos_token, "pad_token": eos_token}
    if tokenizer.token_to_id(PADDING) is not None:
        names["pad_token"] = PADDING
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        **names,
    )
