"""The one exception of the library's heart, its one warning, and how both show a value."""

from __future__ import annotations

import difflib
import re
from typing import Any

SHOWN = 60
"""Characters of a refused value that are said again."""


class TopologyError(ValueError):
    """A name, option, layout or shape that a topology cannot take; the message is one sentence."""

    def __str__(self) -> str:
        message = super().__str__()
        return message + suggestion(message)


def suggestion(message: str) -> str:
    """The nearest allowed word, where the refused one looks like a slip of the finger."""
    if "did you mean" in message:
        return ""
    allowed = "names: |kinds: |options are |fields are |takes one of |takes "
    found = re.search(rf"'([^']+)'.*; .*?(?:{allowed})(.+)$", message)
    near = difflib.get_close_matches(found[1].lower(), found[2].split(", "), n=1) if found else []
    return f"; did you mean {near[0]}?" if near else ""


class NotExact(TopologyError):
    """A topology that cannot compute what another one does, as it is set up."""


class UnmetNeedsWarning(UserWarning):
    """A topology runs without norms inside sublayers, or without first weights, that it is not itself without."""


def shown(value: Any) -> str:
    """A refused value as Python writes it, cut where it is long."""
    try:
        text = repr(value)
    except (ValueError, RecursionError):  # whole numbers of thousands of digits have no text
        text = f"a {type(value).__name__} too large to show"
    return text if len(text) <= SHOWN else f"{text[:SHOWN]}…"
