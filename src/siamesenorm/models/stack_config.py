"""What the configurations of all models share: the shape of the stack, its topology, and presets with names."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Generic, Literal, Self, TypeVar

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from siamesenorm.errors import FieldError
from siamesenorm.field_errors import PlainModel
from siamesenorm.residual import Residual

Config = TypeVar("Config", bound=BaseModel)


class StackConfig(PlainModel):
    """A stack of blocks of attention and FFN: typed, frozen, every field documented, round-trips through JSON."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    dim: int = Field(ge=2, description="Width of the residual stream.")
    blocks: int = Field(ge=1, description="Blocks of attention and FFN.")
    heads: int = Field(ge=1, description="Heads of attention.")
    ffn_dim: int = Field(ge=1, description="Hidden width of the FFN, what its output projection reads.")
    topology: str = Field(default="siamese", description="Residual topology: name, or name:option=value,option=value.")
    qk_norm: Literal["none", "head", "projection"] = Field(
        default="none",
        description="Norm on queries and keys, per head or over the whole projection, if the topology asks for none.",
    )

    parametrization: Literal["standard", "completep"] = Field(
        default="standard",
        description="How first weights, learning rates and branches depend on the model's size: not at all (standard), "
        "or so that the best learning rate is that of the base (completep); see docs/optimization.md.",
    )
    base_width: int | None = Field(
        default=None, ge=1, description="Width at which the learning rate was found; for completep, and only there."
    )
    base_depth: int | None = Field(
        default=None, ge=1, description="Blocks at which the learning rate was found; for completep, and only there."
    )

    @model_validator(mode="after")
    def _check_base(self) -> Self:
        if self.parametrization == "completep":
            for name in ("base_width", "base_depth"):
                if getattr(self, name) is None:
                    raise ValueError(
                        f"{name} = null is not allowed with parametrization = 'completep'; it takes a number"
                    )
        return self

    @field_validator("topology")
    @classmethod
    def _known_topology(cls, text: str) -> str:
        Residual(text, dim=2, blocks=1)  # raises what is wrong with it
        return text

    def check_heads(self, otherwise: str = "") -> None:
        """Raise where the heads do not share the width evenly."""
        if self.dim % self.heads:
            raise FieldError.not_allowed("heads =", self.heads, f"a divisor of dim = {self.dim}{otherwise}")


@dataclass(frozen=True)
class Preset(Generic[Config]):
    """A named configuration."""

    name: str
    about: str
    config: Config


def changed(presets: Mapping[str, Preset[Config]], name: str, changes: Mapping[str, Any]) -> Config:
    """The configuration of one of the presets, checked again with some of its fields changed."""
    if name not in presets:
        raise FieldError.unknown_name("model", name, presets)
    config = presets[name].config
    return type(config).model_validate({**config.model_dump(), **changes})
