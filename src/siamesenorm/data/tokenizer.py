"""What a tokenizer must do, and the built-in one that needs no training: a byte is a token.

tokenizer = load_tokenizer("byte")            # or a tokenizer.json, or a folder that holds one
tokenizer.decode(tokenizer.encode("12 + 34"))
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Protocol

import numpy as np
from numpy.typing import NDArray

from siamesenorm.data.atomic import write_whole
from siamesenorm.data.reading import named_path, read_json, read_text
from siamesenorm.errors import DataError

END_OF_DOCUMENT = "<|endoftext|>"
PADDING = "<|padding|>"
FILE = "tokenizer.json"
SETTINGS = "tokenizer_config.json"
NAMES = ("byte",)

TokenIds = NDArray[np.unsignedinteger[Any]]
"""uint16 or uint32, whichever holds the vocabulary."""


class Tokenizer(Protocol):
    """Text to token ids and back. `encode` never adds special tokens and never reads them out of the text."""

    @property
    def vocab_size(self) -> int:
        """One more than the largest id."""

    @property
    def eos_id(self) -> int:
        """The id that ends every document."""

    @property
    def eos_token(self) -> str:
        """How that id is written."""

    @property
    def fingerprint(self) -> str:
        """SHA-256 of everything that decides the ids; equal fingerprints mean equal tokens."""

    def encode(self, text: str) -> list[int]:
        """The ids of a text."""

    def encode_batch(self, texts: Sequence[str]) -> list[list[int]]:
        """The ids of many texts."""

    def encode_documents(self, texts: Sequence[str]) -> tuple[TokenIds, NDArray[np.int64]]:
        """Documents one after another, each ended by the end-of-document id, and their lengths with that id."""

    def encode_with_special(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The ids of a text in which special tokens are written out, and the character that each begins at."""

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """The text of ids, special ones left out."""

    def to_json(self) -> str:
        """The tokenizer.json it comes from, to be read by `load_tokenizer` and by `tokenizers`."""


def token_dtype(vocab_size: int) -> np.dtype[np.unsignedinteger[Any]]:
    """The smallest of OLMo's two token types that holds a vocabulary."""
    return np.dtype("<u2") if vocab_size <= 1 << 16 else np.dtype("<u4")


class ByteTokenizer:
    """Ids 0 to 255 are the bytes of the UTF-8 text, 256 ends a document, 257 is padding. Every text comes back."""

    vocab_size = 258
    eos_id = 256
    pad_id = 257
    eos_token = END_OF_DOCUMENT

    @property
    def fingerprint(self) -> str:
        """SHA-256 of the tokenizer.json."""
        return fingerprint_of(self.to_json(), self.eos_token)

    def encode(self, text: str | bytes) -> list[int]:
        """The bytes of a text in UTF-8, or of bytes as they are."""
        return list(_bytes_of(text))

    def encode_batch(self, texts: Sequence[str | bytes]) -> list[list[int]]:
        """The bytes of many texts."""
        return [self.encode(text) for text in texts]

    def encode_documents(self, texts: Sequence[str | bytes]) -> tuple[TokenIds, NDArray[np.int64]]:
        """Documents one after another, each ended by id 256, and their lengths with that id."""
        raw = [_bytes_of(text) for text in texts]
        lengths = np.fromiter((len(text) + 1 for text in raw), dtype=np.int64, count=len(raw))
        flat = np.frombuffer(b"\0".join([*raw, b""]), dtype=np.uint8).astype(token_dtype(self.vocab_size))
        flat[np.cumsum(lengths) - 1] = self.eos_id
        return flat, lengths

    def encode_with_special(self, text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """The bytes of a text, special tokens in it read as such, and the character that each is of."""
        special = {END_OF_DOCUMENT: self.eos_id, PADDING: self.pad_id}
        ids: list[int] = []
        places: list[int] = []
        at = 0
        for part in re.split(f"({'|'.join(map(re.escape, special))})", text):
            signs = [(special[part],)] if part in special else [_bytes_of(sign) for sign in part]
            for number, sign in enumerate(signs):
                ids += sign
                places += [at + number] * len(sign)
            at += len(part)
        return np.array(ids, dtype=np.int64), np.array(places, dtype=np.int64)

    def decode(self, ids: Sequence[int] | NDArray[np.integer]) -> str:
        """The text of ids; bytes that are no UTF-8 become U+FFFD."""
        return self.decode_bytes(ids).decode("utf-8", errors="replace")

    def decode_bytes(self, ids: Sequence[int] | NDArray[np.integer]) -> bytes:
        """The very bytes of ids, special ones left out."""
        array = np.asarray(ids, dtype=np.int64)
        if array.size and (array.min() < 0 or array.max() >= self.vocab_size):
            raise DataError(f"ids: {int(array.min())} to {int(array.max())} given; the byte tokenizer has 0 to 257")
        return array[array < 256].astype(np.uint8).tobytes()

    def to_json(self) -> str:
        """A byte-level BPE without merges: the same ids through `tokenizers` and `transformers`."""
        vocabulary = {sign: byte for byte, sign in enumerate(_byte_level_signs())}
        specials = {END_OF_DOCUMENT: self.eos_id, PADDING: self.pad_id}
        byte_level = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}
        added = [
            {"id": number, "content": token, "single_word": False, "lstrip": False, "rstrip": False}
            | {"normalized": False, "special": True}
            for token, number in specials.items()
        ]
        value = {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": added,
            "normalizer": None,
            "pre_tokenizer": byte_level,
            "post_processor": None,
            "decoder": byte_level,
            "model": {"type": "BPE", "vocab": vocabulary | specials, "merges": []},
        }
        return json.dumps(value, indent=1, ensure_ascii=False) + "\n"


def load_tokenizer(name: str | Path, eos: str | None = None) -> Tokenizer:
    """The built-in tokenizer ``byte``, a tokenizer.json, or the one in a folder.

    eos: the token that ends a document; default: what the folder's tokenizer_config.json says, or the first of the
    common ones that the file holds.
    """
    if str(name) == "byte":
        return _byte_tokenizer(eos)
    path = named_path(name, "tokenizer")
    if path.is_dir():
        path, eos = path / FILE, end_token(path) if eos is None else eos
    if not path.is_file():
        raise DataError(
            f"tokenizer: {str(name)!r} is not known; allowed are {', '.join(NAMES)}, the path of a {FILE}, "
            f"or of a folder that holds one"
        )
    return tokenizer_from_json(read_text(path, "tokenizer"), eos, str(path))


def end_token(folder: Path) -> str | None:
    """The token that ends a document, as tokenizer_config.json names it: as text, or as an object with its text."""
    try:
        token = read_json(folder / SETTINGS, "tokenizer", strict=False)["eos_token"]
    except (DataError, LookupError, TypeError):
        return None
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def tokenizer_from_json(text: str, eos: str | None = None, name: str = FILE) -> Tokenizer:
    """The tokenizer of a tokenizer.json's text; `name` is said in errors."""
    if text == ByteTokenizer().to_json():
        return _byte_tokenizer(eos)
    from siamesenorm.data.bpe import JsonTokenizer

    return JsonTokenizer(text, eos=eos, name=name)


def save_tokenizer(tokenizer: Tokenizer, path: str | Path) -> None:
    """Write a tokenizer.json that `load_tokenizer` reads back to the same fingerprint."""
    write_whole(Path(path), tokenizer.to_json())


def fingerprint_of(text: str, eos_token: str) -> str:
    """SHA-256 of a tokenizer.json and the token that ends a document."""
    return hashlib.sha256(f"{eos_token}\n{text}".encode()).hexdigest()


def _byte_tokenizer(eos: str | None) -> ByteTokenizer:
    if eos not in (None, END_OF_DOCUMENT):
        raise DataError.refused("eos", eos, f"the byte tokenizer ends documents with {END_OF_DOCUMENT!r}")
    return ByteTokenizer()


def _bytes_of(text: str | bytes) -> bytes:
    if isinstance(text, bytes):
        return text
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"text: {text[error.start]!r} at character {error.start} is half a surrogate pair") from None


def _byte_level_signs() -> list[str]:
    """The printable sign that stands for every byte in byte-level vocabularies: itself, or one from U+0100 on."""
    plain = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    others = iter(range(256, 512))
    return [chr(byte) if byte in plain else chr(next(others)) for byte in range(256)]
