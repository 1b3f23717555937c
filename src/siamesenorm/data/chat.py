"""Conversations as tokens, and which of these are learnt: answers, each with the token that ends it.

encode = conversation_encoder("byte", "auto")
encode(example).ids, encode(example).scored

| template  | a conversation                                                                                |
|-----------|-----------------------------------------------------------------------------------------------|
| chat      | as the tokenizer's own chat template writes it (a Hugging Face folder's, rendered by transformers) |
| plain     | ``User: …`` and an empty line; ``Assistant: …`` and the end-of-text token; an empty line between turns |
| verbatim  | prompt, answer and the end-of-text token, with nothing between them                           |
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from siamesenorm.data.examples import ASSISTANT, Example
from siamesenorm.data.reading import read_json, read_text, reason_of
from siamesenorm.data.tokenizer import SETTINGS, Tokenizer, load_tokenizer
from siamesenorm.errors import DataError, import_extra

TEMPLATES = ("auto", "chat", "plain", "verbatim")
JINJA = "chat_template.jinja"
PLAIN = (
    "{% for message in messages %}{% if message['role'] == 'assistant' %}"
    "{{ 'Assistant: ' + message['content'] + eos_token }}{% if not loop.last %}{{ '\\n\\n' }}{% endif %}"
    "{% else %}{{ message['role'] | capitalize + ': ' + message['content'] + '\\n\\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"
)
"""The plain template as other programs take it; runs that learnt it carry it."""


class Encoded(NamedTuple):
    """Tokens of a conversation."""

    ids: NDArray[np.integer]
    scored: NDArray[np.bool_]
    """Which of them are learnt."""


Encode = Callable[[Example], Encoded]


def conversation_encoder(tokenizer: str, template: str) -> Encode:
    """What makes tokens of examples; tokenizer: as `load_tokenizer` takes it."""
    chosen, found = load_tokenizer(tokenizer), chat_template(tokenizer, template)
    if found is not None and found != PLAIN:
        return ChatTemplate(found, chosen, tokenizer)
    write = verbatim if template == "verbatim" else plain
    return lambda example: _in_pieces(write(example), chosen)


def chat_template(tokenizer: str, template: str) -> str | None:
    """The template that examples are written by, as text; None where they are written verbatim."""
    if template not in TEMPLATES:
        raise DataError.not_allowed("data.template", template, ", ".join(TEMPLATES))
    if template == "verbatim":
        return None
    own = None if template == "plain" else _own_template(Path(tokenizer))
    if own is None and template == "chat":
        raise DataError.refused(
            "data.template",
            template,
            f"{tokenizer!r} has no chat template, it takes auto, plain or verbatim, or a data.tokenizer that is a "
            f"folder with {JINJA} or a chat_template in {SETTINGS}",
        )
    return PLAIN if own is None else own


def _own_template(path: Path) -> str | None:
    """The default chat template of a tokenizer's folder, from either of the two places where there can be one."""
    if str(path) == "byte" or not path.exists():
        return None
    if (own := _folder(path) / JINJA).is_file():
        return read_text(own, "data.tokenizer")
    said = _settings(path).get("chat_template")
    if isinstance(said, list):  # several by name
        named = {entry.get("name"): entry.get("template") for entry in said if isinstance(entry, dict)}
        said = named.get("default")
    return said if isinstance(said, str) else None


def _folder(path: Path) -> Path:
    return path if path.is_dir() else path.parent


def _settings(path: Path) -> dict[str, Any]:
    """What tokenizer_config.json beside a tokenizer says; nothing where there is none."""
    place = _folder(path) / SETTINGS
    found = read_json(place, "data.tokenizer", strict=False) if place.is_file() else None
    return found if isinstance(found, dict) else {}


class ChatPart(NamedTuple):
    """A stretch of a conversation; an answer is learnt, and the end-of-text token behind it."""

    text: str
    answer: bool


def plain(example: Example) -> list[ChatPart]:
    """The parts of the plain template."""
    parts: list[ChatPart] = []
    for message in example.messages:
        between = "\n\n" if parts and parts[-1].answer else ""
        if message.role == ASSISTANT:
            parts += [ChatPart(f"{between}Assistant:", False), ChatPart(f" {message.content}", True)]
        else:
            parts.append(ChatPart(f"{between}{message.role.capitalize()}: {message.content}\n\n", False))
    return parts


def verbatim(example: Example) -> list[ChatPart]:
    """A prompt and its answer as they stand."""
    if not example.pair or len(example.messages) != 2:
        raise DataError(
            f"{example.place}: data.template = 'verbatim' takes prompt and answer alone; "
            f"system and messages take auto, chat or plain"
        )
    prompt, answer = example.messages
    return [ChatPart(prompt.content, False), ChatPart(answer.content, True)]


def _in_pieces(parts: Sequence[ChatPart], tokenizer: Tokenizer) -> Encoded:
    """Every part by itself, as a prompt is when its answer is asked for."""
    ids: list[int] = []
    scored: list[bool] = []
    for part, own in zip(parts, tokenizer.encode_batch([part.text for part in parts]), strict=True):
        own = [*own, tokenizer.eos_id] if part.answer else own
        ids += own
        scored += [part.answer] * len(own)
    return Encoded(np.array(ids, dtype=np.int64), np.array(scored, dtype=bool))


class ChatTemplate:
    """A chat template of others: what it puts behind the prompt of an answer, up to the next turn, is learnt.

    Special tokens that it writes are read as such. Where it writes no end-of-text token behind the last answer, one is
    put there.
    """

    def __init__(self, template: str, tokenizer: Tokenizer, name: str) -> None:
        self.template, self.tokenizer, self.name = template, tokenizer, name
        purpose = "data.tokenizer: its chat template"
        self.library: Any = import_extra("transformers.utils.chat_template_utils", purpose, "hf")
        self.words = {**_special_words(Path(name)), "eos_token": tokenizer.eos_token}

    def __call__(self, example: Example) -> Encoded:
        """The tokens of the whole conversation, as transformers would make them."""
        text, spans = "", []
        for number, message in enumerate(example.messages):
            if message.role != ASSISTANT:
                continue
            prompt = self._render(example, number, True)
            whole = self._render(example, number + 1, False)
            if not (prompt.startswith(text) and whole.startswith(prompt)):
                raise DataError(
                    f"{example.place}: the chat template of {self.name!r} writes messages[{number}] otherwise than its "
                    f"prompt announces, so that its answer cannot be found; data.template=plain is another"
                )
            text = whole
            spans.append((len(prompt), len(whole)))
        ids, places = self.tokenizer.encode_with_special(text)
        scored = np.zeros(len(ids), dtype=bool)
        for start, stop in spans:
            inside = np.flatnonzero((places >= start) & (places < stop))
            ends = inside[ids[inside] == self.tokenizer.eos_id]
            scored[inside if not ends.size else inside[inside <= ends[0]]] = True  # a line break behind the end is not
        if not (ids[scored] == self.tokenizer.eos_id)[-1:].any():
            ids, scored = np.append(ids, self.tokenizer.eos_id), np.append(scored, True)
        return Encoded(ids, scored)

    def _render(self, example: Example, count: int, prompt: bool) -> str:
        messages = [message._asdict() for message in example.messages[:count]]
        try:
            found: Any = self.library.render_jinja_template(
                [messages], chat_template=self.template, add_generation_prompt=prompt, **self.words
            )
        except Exception as error:  # templates raise what they like
            raise DataError(
                f"{example.place}: the chat template of {self.name!r} does not take these messages: {reason_of(error)}"
            ) from None
        return str(found[0][0] if isinstance(found, tuple) else found[0])


def _special_words(path: Path) -> dict[str, str]:
    """Special tokens that templates call by name, as a tokenizer's folder has them."""
    settings, found = _settings(path), {}
    for name in ("bos_token", "unk_token", "pad_token"):
        said = settings.get(name)
        said = said.get("content") if isinstance(said, dict) else said
        if isinstance(said, str):
            found[name] = said
    return found
