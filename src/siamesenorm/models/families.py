"""The families of models: for what asks about models of any kind, such as the list on the command line."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from siamesenorm.models.counts import Counts
from siamesenorm.models.dit import DIT_PRESETS, DiTConfig, count_dit
from siamesenorm.models.lm import PRESETS, LMConfig, count_lm
from siamesenorm.models.stack_config import Preset
from siamesenorm.models.vit import VIT_PRESETS, ViTConfig, count_vit


@dataclass(frozen=True)
class Family:
    """Models that share a configuration."""

    name: str
    unit: str
    """What costs are counted per."""
    config: type[BaseModel]
    presets: Mapping[str, Preset[Any]]
    count: Callable[[Any], Counts]
    """Costs of a configuration."""


FAMILIES: dict[str, Family] = {
    family.name: family
    for family in (
        Family("language", "token", LMConfig, PRESETS, count_lm),
        Family("vision", "image", ViTConfig, VIT_PRESETS, count_vit),
        Family("diffusion", "image", DiTConfig, DIT_PRESETS, count_dit),
    )
}
