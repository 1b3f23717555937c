"""What a command says that cannot do its work: one sentence on one line, and its exit code."""

from __future__ import annotations

import re
import sys

import typer

from siamesenorm.errors import InputError

EXIT_FAILED, EXIT_BAD_INPUT = 1, 2
LONGEST_WORD, LONGEST = 120, 900
"""Characters of a word and of a whole sentence; names and values may have thousands."""
UsageError = typer.BadParameter.__mro__[1]
"""What typer raises for whatever is wrong with the arguments themselves; it has no public name of its own."""
NO_MEMORY = "can't allocate memory"
"""Torch's own words on a CPU."""


def refusal(error: Exception) -> tuple[str, int] | None:
    """Sentence and exit code for an error that a person can put right; None for a defect, whose trace must be seen."""
    if isinstance(error, InputError):
        message = str(error)
        meant = re.search(r"; did you mean \S+\?$", message)  # it stays where a long message is cut
        end = len(message) if meant is None else meant.start()
        return one_line(message[:end]) + message[end:], EXIT_BAD_INPUT
    if isinstance(error, UsageError):
        return one_line(_usage(error)), EXIT_BAD_INPUT
    if isinstance(error, OSError):
        reason = error.strerror or str(error) or type(error).__name__
        names = " and ".join(repr(str(name)) for name in (error.filename, error.filename2) if name is not None)
        return one_line(f"{names} cannot be used: {reason}" if names else reason), EXIT_BAD_INPUT
    if isinstance(error, MemoryError) or (isinstance(error, RuntimeError) and NO_MEMORY in str(error)):
        return "memory: there is not enough of it for what was asked", EXIT_FAILED
    return None


def say(error: Exception) -> int | None:
    """Say on stderr what a person can put right, and give the exit code for it; None for a defect."""
    refused = refusal(error)
    if refused is None:
        return None
    sentence, code = refused
    if sentence:
        print(f"siamesenorm: {sentence}", file=sys.stderr, flush=True)
    return code


def one_line(message: str) -> str:
    """A message in signs that print, on one line, with long words cut in the middle and long messages at the end."""
    text = " ".join(message.split())
    text = "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode() for sign in text)
    text = re.sub(rf"\S{{{LONGEST_WORD + 1},}}", lambda word: f"{word[0][:70]}…{word[0][-30:]}", text)
    return text if len(text) <= LONGEST else f"{text[:LONGEST]}…"


def _usage(error: Exception) -> str:
    """Which argument is wrong, its value where there is one, what is allowed, and where to read more."""
    context, parameter = getattr(error, "ctx", None), getattr(error, "param", None)
    said = str(getattr(error, "message", None) or "")
    message = (said or _message(error)).strip().rstrip(".")
    if not message:
        return ""  # help was asked for, and is on the screen
    message = f"{message[:1].lower()}{message[1:]}"
    if parameter is not None and said:
        name = max(getattr(parameter, "opts", None) or [parameter.name], key=len)
        value = _value(error)
        message = f"{name}: {message}" if value is None else f"{name}: {value!r} is not allowed; {message}"
    where = "" if context is None else f"; {context.command_path} --help says more"
    return message + where


def _message(error: Exception) -> str:
    """Typer's own words."""
    return str(error.format_message())  # type: ignore[attr-defined]  # every one of its errors has it


def _value(error: Exception) -> str | None:
    """The refused value, where the check that refused it says so."""
    details = getattr(error.__cause__, "errors", None)
    found = details()[0].get("input") if callable(details) else None
    return found if isinstance(found, str) else None
