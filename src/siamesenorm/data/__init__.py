"""Text to tokens to batches: preparation, token files, the order of training, embedded corpora.

from siamesenorm.data import BatchLoader, TrainingData, open_tokens, prepare
prepare(["books/"], "corpus")
loader = BatchLoader(TrainingData(open_tokens("corpus"), 1024), global_batch_size=32)
"""

import importlib
from typing import TYPE_CHECKING, Any

from siamesenorm.errors import DataError

if TYPE_CHECKING:
    from siamesenorm.data.arithmetic import Arithmetic, Problem
    from siamesenorm.data.bpe import JsonTokenizer, train_bpe
    from siamesenorm.data.choices import Choice, ChoiceScore, arithmetic_choices, score_choices
    from siamesenorm.data.index import Index, read_index, verify
    from siamesenorm.data.loader import BatchLoader
    from siamesenorm.data.order import Order, shuffled
    from siamesenorm.data.packing import IGNORED, TrainingData, attention_mask, make_batch
    from siamesenorm.data.preparation import prepare
    from siamesenorm.data.sources import EMBEDDED, embedded_documents
    from siamesenorm.data.texts import embedded_tokens
    from siamesenorm.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, save_tokenizer
    from siamesenorm.data.tokens import Tokens, open_tokens, tokens_in_memory
    from siamesenorm.data.validation import ValidationData

ROOMS = {
    "arithmetic": ("Arithmetic", "Problem"),
    "bpe": ("JsonTokenizer", "train_bpe"),
    "choices": ("Choice", "ChoiceScore", "arithmetic_choices", "score_choices"),
    "index": ("Index", "read_index", "verify"),
    "loader": ("BatchLoader",),
    "order": ("Order", "shuffled"),
    "packing": ("IGNORED", "TrainingData", "attention_mask", "make_batch"),
    "preparation": ("prepare",),
    "sources": ("EMBEDDED", "embedded_documents"),
    "texts": ("embedded_tokens",),
    "tokenizer": ("ByteTokenizer", "Tokenizer", "load_tokenizer", "save_tokenizer"),
    "tokens": ("Tokens", "open_tokens", "tokens_in_memory"),
    "validation": ("ValidationData",),
}
"""Which file holds which name."""

__all__ = [
    "EMBEDDED",
    "IGNORED",
    "Arithmetic",
    "BatchLoader",
    "ByteTokenizer",
    "Choice",
    "ChoiceScore",
    "DataError",
    "Index",
    "JsonTokenizer",
    "Order",
    "Problem",
    "Tokenizer",
    "Tokens",
    "TrainingData",
    "ValidationData",
    "arithmetic_choices",
    "attention_mask",
    "embedded_documents",
    "embedded_tokens",
    "load_tokenizer",
    "make_batch",
    "open_tokens",
    "prepare",
    "read_index",
    "save_tokenizer",
    "score_choices",
    "shuffled",
    "tokens_in_memory",
    "train_bpe",
    "verify",
]


def __getattr__(name: str) -> Any:
    """Import a file at the first use of one of its names: workers and the command line do without torch."""
    for room, names in ROOMS.items():
        if name in names:
            return getattr(importlib.import_module(f"{__name__}.{room}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
