"""The fields of a configuration by dotted name: what each allows, in words, and what is wrong with a value."""

from __future__ import annotations

import types
from collections.abc import Iterator
from typing import Annotated, Any, Literal, NamedTuple, Union, get_args, get_origin

import annotated_types
from pydantic import BaseModel, ValidationError
from pydantic.fields import FieldInfo
from pydantic_core import ErrorDetails, PydanticUndefined

from siamesenorm.errors import SHOWN, shown
from siamesenorm.tasks.base import HowComputed


class NamedField(NamedTuple):
    """A field and where it stands."""

    path: str
    info: FieldInfo
    section: type[BaseModel] | None
    """The class of its own fields, where it is a section."""
    how: bool = False
    """Whether it says how a run is computed and not what it learns, so that a resumed run may have another value."""

    @property
    def optional(self) -> bool:
        """Whether null is allowed."""
        return type(None) in alternatives(self.info.annotation)


def fields_of(config: type[BaseModel], prefix: str = "", how: bool = False) -> Iterator[NamedField]:
    """Every field, sections before what they hold."""
    for name, info in config.model_fields.items():
        marked = how or any(isinstance(mark, HowComputed) for mark in info.metadata)
        field = NamedField(prefix + name, info, section_of(info.annotation), marked)
        yield field
        if field.section is not None:
            yield from fields_of(field.section, f"{field.path}.", marked)


def alternatives(annotation: Any) -> list[Any]:
    """The members of a union, or the one type that it is."""
    if get_origin(annotation) is Annotated:
        return alternatives(get_args(annotation)[0])
    if get_origin(annotation) in (Union, types.UnionType):
        return [inner for part in get_args(annotation) for inner in alternatives(part)]
    return [annotation]


def section_of(annotation: Any) -> type[BaseModel] | None:
    """The configuration class among the alternatives."""
    for part in alternatives(annotation):
        if isinstance(part, type) and issubclass(part, BaseModel):
            return part
    return None


def describe_allowed(field: NamedField) -> str:
    """What a field takes: ``a whole number from 1``, ``one of cosine, wsd, constant``, ``text, or null``."""
    parts = [_describe(part, field.info) for part in alternatives(field.info.annotation) if part is not type(None)]
    return " or ".join(dict.fromkeys(parts)) + (", or null" if field.optional else "")


def values_of(field: NamedField) -> list[str]:
    """Every value that a field takes, as overrides write it, where these can be listed; else its default."""
    kinds = alternatives(field.info.annotation)
    words = [str(choice) for kind in kinds if get_origin(kind) is Literal for choice in get_args(kind)]
    words += ["true", "false"] if bool in kinds else []
    default = default_of(field.info)
    if not words and isinstance(default, (int, float)):
        words = [f"{default:g}" if isinstance(default, float) else str(default)]
    return words + (["null"] if words and field.optional else [])


def _describe(kind: Any, info: FieldInfo) -> str:
    if get_origin(kind) is Literal:
        choices = [str(choice) for choice in get_args(kind)]
        return f"one of {', '.join(choices)}" if len(choices) > 1 else choices[0]
    if get_origin(kind) in (tuple, list):
        inner = {part for argument in get_args(kind) for part in alternatives(argument)}
        return "a list of numbers" if {int, float} & inner else "a list of texts"
    if isinstance(kind, type) and issubclass(kind, BaseModel):
        return f"the fields {', '.join(kind.model_fields)}"
    if kind is bool:
        return "true or false"
    if kind is str:
        return "text"
    return ("a whole number" if kind is int else "a number") + _limits(info)


def _limits(info: FieldInfo) -> str:
    low = high = ""
    for limit in (*info.metadata, *_inner_metadata(info.annotation)):
        if isinstance(limit, annotated_types.Ge):
            low = f" from {limit.ge:g}"
        elif isinstance(limit, annotated_types.Gt):
            low = f" above {limit.gt:g}"
        elif isinstance(limit, annotated_types.Le):
            high = f" to {limit.le}"
        elif isinstance(limit, annotated_types.Lt):
            high = f" and below {limit.lt}"
    return low + high


def _inner_metadata(annotation: Any) -> Iterator[Any]:
    """Limits of the members of a union."""
    for part in get_args(annotation):
        if get_origin(part) is Annotated:
            for inner in get_args(part)[1:]:
                yield from inner.metadata if isinstance(inner, FieldInfo) else (inner,)


def default_of(info: FieldInfo) -> Any:
    """A field's default as plain data, or ``...`` where one must be given."""
    if info.default is PydanticUndefined:
        return ...
    return info.default.model_dump(mode="json") if isinstance(info.default, BaseModel) else info.default


def explain(error: ValidationError, config: type[BaseModel]) -> str:
    """One sentence about the first thing that is wrong: field, value, what is allowed."""
    details = error.errors(include_url=False)
    # A misspelt name also leaves the right one missing; the slip is what should be said.
    first = next((detail for detail in details if detail["type"] == "extra_forbidden"), details[0])
    fields = {field.path: field for field in fields_of(config)}
    path = _path(first, fields)
    if first["type"] == "extra_forbidden":
        return unknown_field(path, fields)
    if first["type"] == "missing":
        return f"{path}: is missing; it takes {describe_allowed(fields[path])}"
    if first["type"] == "value_error":
        message = str(first["msg"]).removeprefix("Value error, ")
        name = path.rpartition(".")[2]
        message = message.removeprefix(f"{name}: ").removeprefix(f"{path}: ")
        return f"{path}: {message}" if path and not message.startswith(f"{path}.") else message
    allowed = describe_allowed(fields[path]) if path in fields else str(first["msg"]).lower()
    return f"{path}: {as_written(first['input'])} is not allowed; it takes {allowed}"


def unknown_field(path: str, fields: dict[str, NamedField]) -> str:
    """One sentence about a name that is no field, with the names that there are beside it."""
    section, _, name = path.rpartition(".")
    depth = path.count(".")
    known = [p.rpartition(".")[2] for p in fields if p.rpartition(".")[0] == section and p.count(".") == depth]
    where = section or "the configuration"
    if not known:
        return f"{path}: unknown field {name[:SHOWN]!r}; {where} has no fields"
    return f"{where}: unknown field {name[:SHOWN]!r}; its fields are {', '.join(known)}"


def as_written(value: Any) -> str:
    """A value of a field as YAML writes it, cut where it is long."""
    words = {True: "true", False: "false", None: "null"}
    return words[value] if value is None or isinstance(value, bool) else shown(value)


def _path(detail: ErrorDetails, fields: dict[str, NamedField]) -> str:
    """The dotted name, without the parts that only tell the members of a union or the items of a list apart."""
    parts: list[str] = []
    for part in map(str, detail["loc"]):
        candidate = ".".join([*parts, part])
        if candidate in fields or detail["type"] == "extra_forbidden":
            parts.append(part)
    return ".".join(parts)
