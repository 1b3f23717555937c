"""Tokenizers as transformers knows them: the byte tokenizer, and those that come as a tokenizer.json."""

from __future__ import annotations

from typing import Protocol

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from siamesenorm.interop.errors import InteropError

BYTES = 256
END_OF_DOCUMENT, PADDING = "<|endoftext|>", "<|padding|>"
SPECIALS = (END_OF_DOCUMENT, PADDING)
"""Ids 256 and 257."""


def byte_tokenizer(vocab_size: int = BYTES + len(SPECIALS)) -> PreTrainedTokenizerFast:
    """Ids 0 to 255 are bytes, 256 ends a document, 257 is padding; a vocabulary of 256 has the bytes alone.

    Every text comes back from its ids, and special tokens are never read out of a text.
    """
    if vocab_size < BYTES:
        raise InteropError(f"vocab_size: {vocab_size} is not allowed; bytes take at least {BYTES}")
    specials = SPECIALS if vocab_size >= BYTES + len(SPECIALS) else ()
    signs = byte_signs()
    tokenizer = Tokenizer(BPE(vocab={sign: byte for byte, sign in enumerate(signs)}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    return as_fast(tokenizer, END_OF_DOCUMENT if specials else None)


class JsonTokenizer(Protocol):
    """A tokenizer that can be written down as a tokenizer.json."""

    @property
    def eos_token(self) -> str:
        """What ends a document."""

    def to_json(self) -> str:
        """The tokenizer.json."""


def for_transformers(
    tokenizer: PreTrainedTokenizerBase | JsonTokenizer | str, vocab_size: int
) -> PreTrainedTokenizerBase:
    """A tokenizer of transformers from its own, from ours, or from the word ``byte``; it must fit `vocab_size`."""
    if tokenizer == "byte":
        made = byte_tokenizer(vocab_size)
    elif isinstance(tokenizer, PreTrainedTokenizerBase):
        made = tokenizer
    elif not isinstance(tokenizer, str) and hasattr(tokenizer, "to_json"):
        made = as_fast(Tokenizer.from_str(tokenizer.to_json()), tokenizer.eos_token)
    else:
        raise InteropError(f"tokenizer: {tokenizer!r} is not known; it takes byte, or a tokenizer of transformers")
    if len(made) > vocab_size:
        raise InteropError(f"tokenizer: it has {len(made)} tokens, more than the model's vocab_size = {vocab_size}")
    return made


def as_fast(tokenizer: Tokenizer, eos_token: str | None) -> PreTrainedTokenizerFast:
    """One for decoder-only models: filled up on the left, no special token read out of a text."""
    names = {"eos_token": eos_token} if eos_token is not None else {}
    if names:
        names["pad_token"] = PADDING if tokenizer.token_to_id(PADDING) is not None else names["eos_token"]
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        split_special_tokens=True,
        clean_up_tokenization_spaces=False,
        padding_side="left",
        model_input_names=["input_ids", "attention_mask"],
        **names,
    )


def byte_signs() -> list[str]:
    """The printable sign that byte-level vocabularies write for every byte: itself, or one from U+0100 on."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(BYTES)]
