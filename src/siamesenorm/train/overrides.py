"""``key=value`` on the command line: ``optimizer.lr=3e-4``, or ``lr=3e-4`` where only one section has such a field."""

from __future__ import annotations

import difflib
import json
from collections.abc import Mapping, Sequence
from pathlib import PurePath
from typing import Any

from pydantic import BaseModel

from siamesenorm.errors import SHOWN, ConfigError
from siamesenorm.train.fields import NamedField, alternatives, fields_of
from siamesenorm.train.yaml import read_yaml

INSTEAD = {
    "train.steps": ("train.tokens", "train.epochs", "schedule.warmup_epochs"),
    "train.tokens": ("train.steps", "train.epochs", "schedule.warmup_epochs"),
    "train.epochs": ("train.steps", "train.tokens"),
    "schedule.warmup": ("schedule.warmup_epochs",),
    "schedule.warmup_epochs": ("schedule.warmup",),
}
"""Setting one of these takes the others back."""
INSTEAD_OF = dict.fromkeys(("accumulation", "train.accumulation"), "train.micro_batch_size, samples at a time")
"""Fields of earlier versions, and what says the same now."""


def apply_overrides(values: dict[str, Any], overrides: Sequence[str], config: type[BaseModel]) -> set[str]:
    """Put overrides into a recipe's values, in order; the values themselves are checked afterwards.

    The dotted names of the fields that were given are returned.
    """
    fields = {field.path: field for field in fields_of(config)}
    named = set()
    for override in overrides:
        key, equals, text = override.partition("=")
        if not equals or not key.strip():
            raise ConfigError.not_allowed("override", override, "key=value, such as lr=1e-3")
        field = find_field(key.strip(), fields)
        named.add(field.path)
        _put(values, field.path, parse_value(text.strip(), field))
        for other in INSTEAD.get(field.path, ()):
            _take(values, other)
    return named


def find_field(key: str, fields: dict[str, NamedField]) -> NamedField:
    """The field of a dotted name, or of a last part that only one section has."""
    if key in fields:
        return fields[key]
    ends = [path for path in fields if path.endswith(f".{key}")]
    shallow = [path for path in ends if path.count(".") == min((p.count(".") for p in ends), default=0)]
    if len(shallow) == 1:
        return fields[shallow[0]]
    if shallow:
        raise ConfigError(f"{key}: is not one field but {len(shallow)}; write one of {', '.join(shallow)}")
    if key in INSTEAD_OF:
        raise ConfigError(f"override: {key!r} is no field any more; it follows from {INSTEAD_OF[key]}")
    names = {path.rpartition(".")[2]: path for path in fields} | {path: path for path in fields}
    near = difflib.get_close_matches(key, names, n=1, cutoff=0.7)
    if near:
        raise ConfigError(f"override: unknown field {key[:SHOWN]!r}; did you mean {names[near[0]]}?")
    section = key.rpartition(".")[0]
    known = [path for path in fields if path.rpartition(".")[0] == section] or [p for p in fields if "." not in p]
    raise ConfigError(
        f"override: unknown field {key[:SHOWN]!r}; fields there are {', '.join(p.rpartition('.')[2] for p in known)}"
    )


def parse_value(text: str, field: NamedField) -> Any:
    """A value as YAML has it, in one line; what is text by its field stays as it is written."""
    kinds = [kind for kind in alternatives(field.info.annotation) if kind is not type(None)]
    if kinds == [str]:
        return None if field.optional and text in ("null", "") else text
    return read_yaml(text, field.path)


def as_text(value: Any) -> str:
    """A value of Python as recipes write it."""
    if isinstance(value, (str, PurePath)):
        return str(value)
    try:
        return json.dumps(value)
    except (TypeError, ValueError):
        raise ConfigError.not_allowed("override", value, "numbers, texts, lists or None") from None


def as_overrides(fields: Mapping[str, Any]) -> list[str]:
    """``key=value`` of fields by name."""
    return [f"{name}={as_text(value)}" for name, value in fields.items()]


def as_setting(name: str, value: Any) -> str:
    """``key=value,value`` of a field that has one value, or several in a list."""
    return f"{name}={','.join(map(as_text, value if isinstance(value, list) else [value]))}"


def _take(values: dict[str, Any], path: str) -> None:
    section, _, name = path.partition(".")
    if isinstance(values.get(section), dict) and name in values[section]:
        values[section] = {key: value for key, value in values[section].items() if key != name}


def _put(values: dict[str, Any], path: str, value: Any) -> None:
    *sections, name = path.split(".")
    inner = values
    for section in sections:
        if not isinstance(inner.get(section), dict):
            inner[section] = {}
        inner[section] = inner = dict(inner[section])
    inner[name] = value
