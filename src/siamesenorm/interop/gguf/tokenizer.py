"""Byte-level BPE tokenizers between GGUF's metadata and tokenizer.json; how text is cut before is a name in GGUF."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from siamesenorm.data.reading import parse_json
from siamesenorm.errors import InteropError
from siamesenorm.interop.foreign_folder import silenced

NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5
SPECIAL = {"bos": "bos", "eos": "eos", "pad": "padding", "unk": "unknown"}
"""transformers' names of special tokens to GGUF's."""
PREFIX = "tokenizer.ggml."


def byte_level(use_regex: bool) -> dict[str, Any]:
    """Bytes as signs, cut as GPT-2 does or not at all."""
    return {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": use_regex}


def cut_by(digits: str) -> dict[str, Any]:
    """The words of Llama 3 and Qwen 2, which differ in how many digits stay together."""
    words = (
        r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|" + digits + r"| ?[^\s\p{L}\p{N}]+[\r\n]*|"
        r"\s*[\r\n]+|\s+(?!\S)|\s+"
    )
    cut = {"type": "Split", "pattern": {"Regex": words}, "behavior": "Isolated", "invert": False}
    return {"type": "Sequence", "pretokenizers": [cut, byte_level(False)]}


@dataclass(frozen=True)
class Cut:
    """What is done to a text before its bytes are merged."""

    pre_tokenizer: dict[str, Any]
    normalizer: dict[str, Any] | None = None
    ignore_merges: bool = False


CUTS = {
    "gpt-2": Cut(byte_level(True)),
    "smollm": Cut(
        {"type": "Sequence", "pretokenizers": [{"type": "Digits", "individual_digits": True}, byte_level(True)]}
    ),
    "llama-bpe": Cut(cut_by(r"\p{N}{1,3}"), ignore_merges=True),
    "qwen2": Cut(cut_by(r"\p{N}"), {"type": "NFC"}),
}
"""By GGUF's names for them."""


def read_tokenizer(metadata: dict[str, Any]) -> Any:
    """The tokenizer of a file's metadata as one of transformers; None where the file has none."""
    from tokenizers import Tokenizer
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    kind, cut = metadata.get(f"{PREFIX}model", "none"), metadata.get(f"{PREFIX}pre")
    if kind == "none":
        return None
    if kind != "gpt2" or cut not in CUTS:
        raise InteropError(
            f"source: its tokenizer, model {kind!r} with pre {cut!r}, cannot be carried; it takes gpt2 with one of "
            f"{', '.join(CUTS)}, and --no-tokenizer leaves it behind"
        )
    tokens, merges = (_texts(metadata.get(f"{PREFIX}{name}")) for name in ("tokens", "merges"))
    types = metadata.get(f"{PREFIX}token_type", [NORMAL] * len(tokens))
    if not tokens or not merges or not isinstance(types, list) or len(types) != len(tokens):
        raise InteropError("source: tokens, token_type and merges of its tokenizer are damaged")
    named = {ours: _token(metadata, tokens, theirs) for ours, theirs in SPECIAL.items()}
    starts = named["bos"] if metadata.get(f"{PREFIX}add_bos_token") else None
    made = {
        "version": "1.0",
        "added_tokens": [_added(i, tokens[i], kind) for i, kind in enumerate(types) if kind in (CONTROL, USER_DEFINED)],
        "normalizer": CUTS[cut].normalizer,
        "pre_tokenizer": CUTS[cut].pre_tokenizer,
        "post_processor": None,
        "decoder": byte_level(True),
        "model": {
            "type": "BPE",
            "vocab": {token: i for i, token in enumerate(tokens)},
            "merges": merges,
            "ignore_merges": CUTS[cut].ignore_merges,
        },
    }
    try:
        tokenizer = Tokenizer.from_str(json.dumps(made))
    except Exception as error:  # the library has no narrower word for it
        raise InteropError(f"source: its tokenizer is damaged: {str(error)[:200]}") from None
    if starts is not None:
        special = [(starts, tokens.index(starts))]
        tokenizer.post_processor = TemplateProcessing(
            single=[starts, "$A"], pair=[starts, "$A", "$B:1"], special_tokens=special
        )
    with silenced():
        return PreTrainedTokenizerFast(
            tokenizer_object=tokenizer,
            clean_up_tokenization_spaces=False,
            padding_side="left",
            model_input_names=["input_ids", "attention_mask"],
            chat_template=metadata.get("tokenizer.chat_template"),
            **{f"{name}_token": token for name, token in named.items() if token is not None},
        )


def _texts(value: Any) -> list[str]:
    """A list of texts; nothing where it is none."""
    return value if isinstance(value, list) and all(isinstance(text, str) for text in value) else []


def _token(metadata: dict[str, Any], tokens: list[str], name: str) -> str | None:
    number = metadata.get(f"{PREFIX}{name}_token_id")
    return tokens[number] if isinstance(number, int) and 0 <= number < len(tokens) else None


def _added(number: int, content: str, kind: int) -> dict[str, Any]:
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    return {"id": number, "content": content, "special": kind == CONTROL, **flags}


def tokenizer_metadata(tokenizer: Any, vocab_size: int) -> Iterator[tuple[str, Any]]:
    """Metadata of a tokenizer of transformers; one that GGUF has no name for is refused."""
    known = parse_json(tokenizer.backend_tokenizer.to_str())
    model = known["model"]
    cut = next((name for name, cut in CUTS.items() if _is_cut(known, cut)), None)
    if cut is None or not model.get("merges"):
        raise InteropError(
            "--to: this tokenizer cannot be carried by gguf, which takes byte-level BPE, cut as one of "
            f"{', '.join(CUTS)}; --no-tokenizer leaves it behind"
        )
    tokens, types = [f"[PAD{i}]" for i in range(vocab_size)], [UNUSED] * vocab_size
    for token, number in model["vocab"].items():
        tokens[number], types[number] = token, NORMAL
    for added in known["added_tokens"]:
        tokens[added["id"]], types[added["id"]] = added["content"], CONTROL if added["special"] else USER_DEFINED
    yield f"{PREFIX}model", "gpt2"
    yield f"{PREFIX}pre", cut
    yield f"{PREFIX}tokens", tokens
    yield f"{PREFIX}token_type", types
    yield f"{PREFIX}merges", [merge if isinstance(merge, str) else " ".join(merge) for merge in model["merges"]]
    numbers = {theirs: getattr(tokenizer, f"{ours}_token_id") for ours, theirs in SPECIAL.items()}
    yield from ((f"{PREFIX}{name}_token_id", number) for name, number in numbers.items() if number is not None)
    yield f"{PREFIX}add_bos_token", numbers["bos"] is not None and tokenizer("a").input_ids[:1] == [numbers["bos"]]
    if isinstance(tokenizer.chat_template, str):
        yield "tokenizer.chat_template", tokenizer.chat_template


def _is_cut(known: dict[str, Any], cut: Cut) -> bool:
    """Whether a tokenizer.json does the same to a text; what only moves offsets counts for nothing."""
    pair = (_without_offsets(known["pre_tokenizer"]), known["normalizer"], bool(known["model"].get("ignore_merges")))
    return pair == (_without_offsets(cut.pre_tokenizer), cut.normalizer, cut.ignore_merges)


def _without_offsets(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_offsets(inner) for name, inner in value.items() if name != "trim_offsets"}
    return [_without_offsets(inner) for inner in value] if isinstance(value, list) else value
