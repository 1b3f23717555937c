"""Examples to fine-tune on: JSONL whose lines are a prompt with its answer, or the messages of a conversation.

{"prompt": "2 + 3 =", "answer": "5"}
{"messages": [{"role": "user", "content": "2 + 3?"}, {"role": "assistant", "content": "5"}]}

``completion`` and ``response`` are other names of ``answer``; ``system`` may stand beside a prompt.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

from siamesenorm.data.documents import Piece, Reading, decode_text
from siamesenorm.data.files import BOM, JsonLinesFile, LinePlace
from siamesenorm.data.reading import parse_json, reason_of
from siamesenorm.data.sources import ENDINGS, find_sources
from siamesenorm.errors import DataError

ANSWERS = ("answer", "completion", "response")
"""Names of the field that is learnt."""
ASSISTANT = "assistant"
"""Whose messages are learnt."""


class Message(NamedTuple):
    """One turn of a conversation."""

    role: str
    content: str


class Example(NamedTuple):
    """A conversation that ends with an answer, and where it stands."""

    messages: tuple[Message, ...]
    place: LinePlace
    pair: bool
    """Whether it was a prompt with its answer."""


def is_examples(path: Path) -> bool:
    """Whether a file, or the first of a folder's, is JSONL of examples: its first line has a prompt or messages."""
    if not (path.is_dir() or (path.is_file() and {*ENDINGS} & set(path.suffixes))):
        return False
    try:
        file = find_sources([path])[0]
        if not isinstance(file, JsonLinesFile):
            return False
        line = next((line for _, line in file.lines(_all(file)) if line.strip()), b"")
        value = parse_json(line, strict=False)
    except (DataError, ValueError):
        return False  # what is wrong with it is said where it is read
    return isinstance(value, dict) and ("messages" in value or ("prompt" in value and "text" not in value))


def read_examples(name: str) -> Iterator[Example]:
    """The examples of a file, or of a folder's files; what is wrong is one sentence with file, line and field."""
    for file in find_sources([name]):
        if not isinstance(file, JsonLinesFile):
            raise DataError(f"data: {file.name} is no JSONL; a folder of examples takes files that end in .jsonl")
        for offset, line in file.lines(_all(file)):
            if offset == 0:
                line = line.removeprefix(BOM)
            if not line.isspace():
                yield _example(line, LinePlace(file, offset))


def _all(file: JsonLinesFile) -> Piece:
    return Piece(0, file.size(), file.size())


def _example(line: bytes, place: LinePlace) -> Example:
    text = decode_text(line, place, Reading(), Counter[str]())
    try:
        value = parse_json(text or "")
    except ValueError as error:
        raise DataError(f"{place}: not valid JSON ({reason_of(error)}); allowed is one object per line") from None
    if not isinstance(value, dict):
        raise DataError(f"{place}: {str(text)[:40]!r} is no JSON object; allowed is one per line")
    if "messages" in value:
        if "prompt" in value:
            raise DataError(f"{place}: fields 'prompt' and 'messages' are both there; it takes one of the two")
        return Example(_conversation(value["messages"], place), place, pair=False)
    return Example(_pair(value, place), place, pair=True)


def _pair(value: dict[str, Any], place: LinePlace) -> tuple[Message, ...]:
    answers = [name for name in ANSWERS if name in value]
    if "prompt" not in value or len(answers) != 1:
        fields = ", ".join(map(str, value)) or "none"
        raise DataError(
            f"{place}: the fields are {fields[:200]}; it takes prompt and one of {', '.join(ANSWERS)}, or messages"
        )
    system = [Message("system", _text(value, "system", place))] if value.get("system") is not None else []
    prompt = Message("user", _text(value, "prompt", place))
    return (*system, prompt, Message(ASSISTANT, _answer(value, answers[0], place)))


def _conversation(messages: Any, place: LinePlace) -> tuple[Message, ...]:
    if not isinstance(messages, list) or not all(isinstance(message, dict) for message in messages):
        raise DataError(f"{place}: field 'messages' is no list of objects; each takes role and content")
    found = []
    for number, message in enumerate(messages):
        inside = f"messages[{number}]."
        role = _text(message, "role", place, inside).strip()
        if not role:
            raise DataError(f"{place}: field '{inside}role' is empty; it takes user, assistant, system or another name")
        read = _answer if role == ASSISTANT else _text
        found.append(Message(role, read(message, "content", place, inside)))
    while found and found[-1].role != ASSISTANT:  # nobody answers these
        found.pop()
    if not found:
        raise DataError(f"{place}: field 'messages' has no message of role {ASSISTANT!r}; there is nothing to learn")
    return tuple(found)


def _text(value: dict[str, Any], name: str, place: LinePlace, inside: str = "") -> str:
    if name not in value:
        raise DataError(f"{place}: no field '{inside}{name}'; it takes text")
    if not isinstance(text := value[name], str):
        raise DataError(f"{place}: field '{inside}{name}' is {str(text)[:40]!r}; it takes text")
    return text


def _answer(value: dict[str, Any], name: str, place: LinePlace, inside: str = "") -> str:
    text = _text(value, name, place, inside)
    if not text.strip():
        raise DataError(f"{place}: field '{inside}{name}' is empty; there is nothing to learn")
    return text
