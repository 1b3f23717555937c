"""The one exception of the library's heart, its one warning, and how both show a value."""

from __future__ import annotations

from typing import Any

SHOWN = 60
"""Characters of a refused value that are said again."""


class TopologyError(ValueError):
    """A name, option, layout or shape that a topology cannot take; the message is one sentence."""


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
