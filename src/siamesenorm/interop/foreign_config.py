"""Configurations in other people's field names, read into ours: what is wrong is said in one sentence."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError

from siamesenorm.errors import OfficialError

Config = TypeVar("Config", bound=BaseModel)


def checked(kind: type[Config], fields: Mapping[str, Any]) -> Config:
    """Our configuration of these fields, in our names."""
    try:
        return kind.model_validate(dict(fields))
    except ValidationError as error:
        first = error.errors()[0]
        said = first["msg"].removeprefix("Value error, ")
        if first["loc"]:
            said = f"{first['loc'][0]} = {first['input']!r} is not allowed: {said[:1].lower()}{said[1:]}"
        raise OfficialError(f"config: {said}") from None


def as_mapping(config: Any) -> Mapping[str, Any]:
    """The configuration, where it is one."""
    if not isinstance(config, Mapping) or not all(isinstance(name, str) for name in config):
        raise OfficialError.not_allowed("config", type(config).__name__, "a mapping of names to values")
    return config


def whole_number(config: Mapping[str, Any], name: str, default: int | None = None) -> int:
    """A field that must be a whole number from 1."""
    value = config.get(name)
    value = default if value is None else value
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise OfficialError.not_allowed(f"config: {name} =", value, "a whole number from 1")
    return value


def number(config: Mapping[str, Any], name: str, default: float) -> float:
    """A field that must be a number above 0."""
    value = config.get(name, default)
    if not isinstance(value, (int, float)) or isinstance(value, bool) or not 0 < value < float("inf"):
        raise OfficialError.not_allowed(f"config: {name} =", value, "a number above 0")
    return value


def read_keywords(
    kind: type[Config], given: Mapping[str, Any], names: Mapping[str, str], defaults: Mapping[str, Any], topology: str
) -> Config:
    """Our configuration from the keywords of an official constructor of vision or diffusion.

    names: its keywords to our fields, beside mlp_ratio. defaults: its own, by our fields, where ours are others.
    """
    unknown = sorted(set(as_mapping(given)) - set(names) - {"mlp_ratio"})
    if unknown:
        known = ", ".join([*names, "mlp_ratio"])
        raise OfficialError(f"config: {unknown[0]} = {given[unknown[0]]!r} is not a known field; known: {known}")
    width = next(theirs for theirs, ours in names.items() if ours == "dim")
    ffn_dim = int(whole_number(given, width, defaults["dim"]) * number(given, "mlp_ratio", 4.0))
    fields = {ours: given[theirs] for theirs, ours in names.items() if theirs in given}
    return checked(kind, {**defaults, **fields, "topology": topology, "ffn_dim": ffn_dim})
