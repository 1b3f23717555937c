"""The byte tokenizer as transformers knows tokenizers: a byte of the UTF-8 text is a token."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import ByteLevel
from transformers import PreTrainedTokenizerFast

BYTES = 256
END_OF_DOCUMENT, PADDING = "<|endoftext|>", "<|padding|>"
SPECIALS = (END_OF_DOCUMENT, PADDING)
"""Ids 256 and 257."""


def byte_tokenizer(vocab_size: int = BYTES + len(SPECIALS)) -> PreTrainedTokenizerFast:
    """Ids 0 to 255 are bytes, 256 ends a document, 257 is padding; a vocabulary of 256 has the bytes alone.

    Every text comes back from its ids, and special tokens are never read out of a text.
    """
    if vocab_size < BYTES:
        raise ValueError(f"vocab_size: {vocab_size} is not allowed; bytes take at least {BYTES}")
    specials = SPECIALS if vocab_size >= BYTES + len(SPECIALS) else ()
    signs = byte_signs()
    tokenizer = Tokenizer(BPE(vocab={sign: byte for byte, sign in enumerate(signs)}, merges=[]))
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in specials])
    names = {"eos_token": END_OF_DOCUMENT, "pad_token": PADDING} if specials else {}
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
