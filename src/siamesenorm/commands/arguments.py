"""What every command asks of its arguments before it begins: text is UTF-8, numbers are finite, names can be names."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import typer

from siamesenorm.errors import DataError

LARGEST = 2**63 - 1
"""Whole numbers that arrays, seeds and counts can take."""


class CommandLine(typer.Typer):
    """Typer's application, whose commands find their arguments checked."""

    def command(self, *args: Any, **kwargs: Any) -> Callable[[Any], Any]:
        """Register a function as a command; the function itself stays as it is."""
        register = super().command(*args, **kwargs)

        def decorate(function: Callable[..., Any]) -> Callable[..., Any]:
            register(checked(function))
            return function

        return decorate


def checked(command: Callable[..., Any]) -> Callable[..., Any]:
    """The command behind a check of all values that it is called with."""

    @functools.wraps(command)
    def run(**values: Any) -> Any:
        for name, value in values.items():
            for part in value if isinstance(value, (list, tuple)) else [value]:
                check(name.strip("_").replace("_", "-"), part)
        return command(**values)

    return run


def check(name: str, value: object) -> None:
    """Raise one sentence where no command could take such a value."""
    if isinstance(value, float) and not math.isfinite(value):
        raise DataError.not_allowed(name, value, "a finite number")
    if isinstance(value, int) and not -LARGEST <= value <= LARGEST:
        raise DataError.not_allowed(name, value, "a whole number of up to 63 bits")
    if isinstance(value, str):
        try:
            value.encode()
        except UnicodeEncodeError as error:
            raise DataError.not_allowed(name, value, f"UTF-8 text, see character {error.start}") from None
        if "\0" in value:
            raise DataError.not_allowed(name, value, "text without NUL")
    if isinstance(value, Path):
        from siamesenorm.data.reading import named_path  # with pydantic, for which help does not wait

        named_path(value, name)
