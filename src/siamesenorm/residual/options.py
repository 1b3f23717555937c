"""Typed options: frozen dataclasses whose fields carry their own help and limits.

Values may come from Python or as text ("siamese:depth_scaling=none,input_norm=false"); either way a wrong
name, type or value raises one sentence with what is allowed.
"""

from __future__ import annotations

import dataclasses
import math
import types
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from siamesenorm.errors import TopologyError, shown

O = TypeVar("O", bound="Options")
WORDS: dict[str, Any] = {"true": True, "yes": True, "on": True, "false": False, "no": False, "off": False}


def option(default: Any, help: str, *, low: float | None = None, high: float | None = None) -> Any:
    """A field with its help text and, for numbers, the inclusive range of allowed values."""
    return dataclasses.field(default=default, metadata={"help": help, "low": low, "high": high})


@dataclasses.dataclass(frozen=True)
class Options:
    """The options of every topology; those with more subclass it."""

    prores: int = option(
        0,
        "steps over which the first block's branches grow in, block l over l times as many (ProRes); 0: not at all",
        low=0,
        high=10**9,
    )

    @classmethod
    def listed(cls) -> list[dataclasses.Field[Any]]:
        """The fields, a topology's own before those that every topology has."""
        common = {field.name for field in dataclasses.fields(Options)}
        return sorted(dataclasses.fields(cls), key=lambda field: field.name in common)

    @classmethod
    def parse(cls: type[O], values: Mapping[str, Any], owner: str) -> O:
        """Checked options from names and values; `owner` is named in errors."""
        known = {field.name: field for field in cls.listed()}
        for name in values:
            if name not in known:
                raise TopologyError(f"{owner}: unknown option {shown(name)}; its options are {', '.join(known)}")
        hints = get_type_hints(cls)
        return cls(**{name: _check(owner, known[name], hints[name], value) for name, value in values.items()})


def describe_type(hint: Any) -> str:
    """What a field allows, in words: ``true or false``, ``one of a, b``, ``a number``."""
    kind, choices, optional = _parts(hint)
    names = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    text = f"one of {', '.join(map(str, choices))}" if choices else names[kind]
    return f"{text}, or default" if optional else text


def _parts(hint: Any) -> tuple[Any, tuple[Any, ...], bool]:
    """The type of a field, its choices where it is a literal, and whether it may be None."""
    optional = get_origin(hint) in (Union, types.UnionType)
    kind = next(t for t in get_args(hint) if t is not type(None)) if optional else hint
    return kind, get_args(kind) if get_origin(kind) is Literal else (), optional


def _check(owner: str, field: dataclasses.Field[Any], hint: Any, value: Any) -> Any:
    kind, choices, optional = _parts(hint)
    low, high = field.metadata.get("low"), field.metadata.get("high")
    allowed = describe_type(hint)
    if low is not None or high is not None:
        allowed += f" from {low}" if high is None else f" from {low} to {high}"
    wrong = TopologyError(f"{owner}: option {field.name} = {shown(value)} is not allowed; it takes {allowed}")
    if optional and (value is None or value == "default"):
        return None
    if choices:
        if value not in choices:
            raise wrong
        return value
    if kind is bool:
        if isinstance(value, str):
            value = WORDS.get(value.lower())
        if not isinstance(value, bool):
            raise wrong
        return value
    if kind is str:
        if not isinstance(value, str) or not value:
            raise wrong
        return value
    if isinstance(value, bool) or not isinstance(value, (int, float, str)):
        raise wrong
    try:
        number = kind(value)
        is_exact = number == float(value) and math.isfinite(number)
    except (ValueError, OverflowError):
        raise wrong from None
    if not is_exact or (low is not None and number < low) or (high is not None and number > high):
        raise wrong
    return number
