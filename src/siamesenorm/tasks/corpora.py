"""From the names in a run's data section to tokens and the tokenizer that made them."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from siamesenorm.data.answers import answer_tokens
from siamesenorm.data.arithmetic import Arithmetic
from siamesenorm.data.atomic import write_json
from siamesenorm.data.chat import chat_template
from siamesenorm.data.examples import is_examples
from siamesenorm.data.held_out import NEEDED
from siamesenorm.data.index import INDEX, PROGRESS, read_index
from siamesenorm.data.reading import named_path, read_object
from siamesenorm.data.sources import EMBEDDED
from siamesenorm.data.texts import embedded_tokens, is_text, text_tokens
from siamesenorm.data.tokenizer import FILE, SETTINGS, Tokenizer, load_tokenizer, save_tokenizer
from siamesenorm.data.tokens import Tokens, open_tokens
from siamesenorm.errors import DataError

if TYPE_CHECKING:
    from siamesenorm.tasks.language_config import TextDataConfig


def is_embedded(name: str) -> bool:
    """Whether a corpus is one that needs no file; a folder of that name goes before it."""
    return name.partition(":")[0] in EMBEDDED and not named_path(name, "data.train").exists()


def is_prepared(name: str) -> bool:
    """Whether a corpus is a folder that `siamesenorm data prepare` wrote, finished or not."""
    path = named_path(name, "data.train")
    return (path / INDEX).is_file() or (path / PROGRESS).is_dir()


def is_plain_text(name: str) -> bool:
    """Whether a corpus is a text file, or a folder of them."""
    return not is_embedded(name) and not is_prepared(name) and is_text(Path(name))


def is_answered(name: str) -> bool:
    """Whether a corpus is JSONL of examples, whose answers are learnt."""
    return is_plain_text(name) and is_examples(Path(name))


def open_corpus(name: str, data: TextDataConfig, split: str) -> Tokens:
    """The tokens of a corpus in one split; arrays have none and are taken whole.

    So are texts where others are held out; the same text on both sides is split.
    """
    if is_embedded(name):
        if data.tokenizer == "byte":
            return embedded_tokens(name, split)  # kept from one run to the next
        return embedded_tokens(name, split, tokenizer=load_tokenizer(data.tokenizer))
    if not named_path(name, "data.train").exists():
        raise DataError(
            f"data.train: {name!r} is neither a file nor a folder nor one of {', '.join(EMBEDDED)}; "
            f"siamesenorm data prepare makes a folder from your text"
        )
    if is_plain_text(name):
        divided = data.validation is None or (name in data.train and name in data.validation)
        side = split if divided else None
        if is_answered(name):
            return answer_tokens(name, side, data.tokenizer, data.template, sequence_length=data.sequence_length)
        return text_tokens(name, side, data.tokenizer)
    return open_tokens(name, split=split, dtype=data.dtype, eos_id=data.eos_id)


def held_out_names(data: TextDataConfig) -> list[str]:
    """Corpora to evaluate on; training corpora that are arrays hold out nothing."""
    if data.validation is not None:
        return list(data.validation)
    return [name for name in data.train if is_embedded(name) or is_prepared(name) or is_plain_text(name)]


def open_held_out(data: TextDataConfig) -> list[Tokens]:
    """Texts to evaluate on: those named, or what the training corpora hold out."""
    opened = (open_corpus(name, data, "validation") for name in held_out_names(data))
    if data.validation is not None:
        return list(opened)
    found = [tokens for tokens in opened if len(tokens)]
    if not found:
        raise DataError(
            f"data.validation: {data.train[0]!r} holds out no text; name some to evaluate on, or take {NEEDED:,} "
            f"tokens of text or more, prepared with --validation 0.05, or train with evaluation.every=null"
        )
    return found


def arithmetic_settings(data: TextDataConfig) -> Arithmetic:
    """What arithmetic questions are made of: a training corpus's own settings, whose held-out problems they are."""
    for name in data.train:
        base, _, options = name.partition(":")
        if base == "arithmetic" and is_embedded(name):
            return Arithmetic.parse(options)
    return Arithmetic()


def tokenizer_of(data: TextDataConfig) -> Tokenizer:
    """What made the tokens: the prepared folder's own, or the one the data section names."""
    for name in data.train:
        if not is_embedded(name) and is_prepared(name):
            return load_tokenizer(name, read_index(name).tokenizer.eos_token)
    return load_tokenizer(data.tokenizer)


def save_tokenizer_of(data: TextDataConfig, folder: Path) -> None:
    """Write the tokenizer into a folder, from which `load_saved_tokenizer` reads it."""
    tokenizer = tokenizer_of(data)
    save_tokenizer(tokenizer, folder / FILE)
    settings = {"eos_token": tokenizer.eos_token}
    if any(map(is_answered, data.train)) and (template := chat_template(data.tokenizer, data.template)) is not None:
        settings["chat_template"] = template
    write_json(folder / SETTINGS, settings)


def load_saved_tokenizer(folder: Path) -> Tokenizer:
    """The tokenizer of a run folder."""
    if not (folder / FILE).is_file():
        raise DataError(f"run: {str(folder)!r} has no {FILE}")
    return load_tokenizer(folder)


def saved_template(folder: Path) -> str | None:
    """The chat template that a run has learnt, where it has."""
    try:
        found = read_object(folder / SETTINGS, "run").get("chat_template")
    except DataError:
        return None
    return found if isinstance(found, str) else None
