"""Named configurations, of any family of models."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from pydantic import BaseModel

Config = TypeVar("Config", bound=BaseModel)


@dataclass(frozen=True)
class Preset(Generic[Config]):
    """A named configuration."""

    name: str
    about: str
    config: Config


def changed(presets: Mapping[str, Preset[Config]], name: str, changes: Mapping[str, Any]) -> Config:
    """The configuration of one of the presets, checked again with some of its fields changed."""
    if name not in presets:
        raise ValueError(f"model: unknown name {name!r}; known names: {', '.join(presets)}")
    config = presets[name].config
    return type(config).model_validate({**config.model_dump(), **changes})
