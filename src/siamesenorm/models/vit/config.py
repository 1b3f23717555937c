"""The vision Transformer's configuration: typed, frozen, every field documented, round-trips through dict and JSON."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import BeforeValidator, Field, model_validator

from siamesenorm.errors import FieldError
from siamesenorm.layers.mlp import Activation
from siamesenorm.models.stack_config import StackConfig
from siamesenorm.residual import NormSpec
from siamesenorm.residual.norms import NormKind

Side = Annotated[int, Field(ge=1)]
Sides = Annotated[tuple[Side, Side], BeforeValidator(lambda v: tuple(v) if isinstance(v, list) else v)]


class ViTConfig(StackConfig):
    """Everything that decides a vision Transformer's function and its first weights; defaults are those of DeiT."""

    image_size: Side | Sides = Field(description="Pixels of an image's side, or height and width.")
    patch_size: int = Field(ge=1, description="Pixels of a patch's side; a divisor of the image's.")
    channels: int = Field(default=3, ge=1, description="Channels of an image: 3 for colour, 1 for grey.")
    classes: int = Field(ge=0, description="Classes to tell apart; 0: no head, the model gives features.")
    activation: Activation = Field(default="gelu", description="gelu, or swiglu (value and gate, each of ffn_dim).")
    norm: NormKind = Field(
        default="layer", description="Kind of every norm: rms, layer, or gated (GatedNorm; norms in sublayers are rms)."
    )
    norm_eps: float = Field(default=1e-6, gt=0, description="Added to the variance in every norm.")
    bias: bool = Field(default=True, description="Whether projections have a bias.")
    qkv_bias: bool = Field(default=True, description="Whether queries, keys and values have a bias.")
    distilled: bool = Field(default=False, description="A second token and head that learn from a teacher.")
    pool: Literal["token", "avg", "none"] = Field(
        default="token", description="What the head reads: the class token, the mean of all patches, every token."
    )
    drop_path: float = Field(
        default=0.0, ge=0, lt=1, description="Stochastic depth of the last block; rates rise from 0 at the first."
    )
    dropout: float = Field(
        default=0.0, ge=0, lt=1, description="Dropout on the embedding and on every sublayer's update."
    )
    init_std: float = Field(default=0.02, gt=0, description="Standard deviation of the first weights.")
    dynamic_size: bool = Field(
        default=False, description="Whether images of other sizes are taken, with positions interpolated each time."
    )

    @model_validator(mode="after")
    def _check(self) -> ViTConfig:
        self.check_heads()
        if any(side % self.patch_size for side in self.image_shape):
            raise FieldError.not_allowed(
                "patch_size =", self.patch_size, f"a divisor of image_size = {self.image_size}"
            )
        if self.distilled and self.pool != "token":
            raise FieldError.not_allowed("pool =", self.pool, "'token'", "with distilled = true")
        return self

    @property
    def image_shape(self) -> tuple[int, int]:
        """Height and width of an image."""
        return (self.image_size, self.image_size) if isinstance(self.image_size, int) else self.image_size

    @property
    def grid(self) -> tuple[int, int]:
        """Rows and columns of patches."""
        height, width = self.image_shape
        return height // self.patch_size, width // self.patch_size

    @property
    def prefix_tokens(self) -> int:
        """Tokens before the patches: the class token, and the distillation token where there is one."""
        return 2 if self.distilled else 1

    @property
    def tokens(self) -> int:
        """Tokens of an image, the prefix included."""
        return self.prefix_tokens + self.grid[0] * self.grid[1]

    @property
    def drop_path_rates(self) -> list[float]:
        """Stochastic depth by block."""
        last = max(self.blocks - 1, 1)
        return [self.drop_path * block / last for block in range(self.blocks)]

    @property
    def norm_spec(self) -> NormSpec:
        """What makes every norm of the model."""
        return NormSpec(self.norm, self.norm_eps)
