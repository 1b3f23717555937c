"""Errors that name the nearest allowed word where the refused one looks like a slip of the finger."""

from __future__ import annotations


class Suggesting(ValueError):
    """What a person can put right; the message is one sentence, and says what was probably meant."""

    def __str__(self) -> str:
        from siamesenorm.residual.errors import suggestion  # also where the library's heart is used alone

        message = super().__str__()
        return message + suggestion(message)
