"""The diffusion Transformer's configuration: typed, frozen, documented, round-trips through dict and JSON."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from siamesenorm.residual import Norms, NormSpec, find_topology, parse_topology


class DiTConfig(BaseModel):
    """Everything that decides a diffusion Transformer's function and its first weights."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    input_size: int = Field(ge=1, description="Height and width of an image, or of its latent.")
    patch_size: int = Field(ge=1, description="Height and width of a patch, which is one token.")
    channels: int = Field(ge=1, description="Channels of an image, or of its latent.")
    classes: int = Field(ge=1, description="Classes; label `classes` itself stands for none of them.")
    dim: int = Field(ge=4, description="Width of the residual stream.")
    blocks: int = Field(ge=1, description="Blocks of attention and FFN.")
    heads: int = Field(ge=1, description="Heads of attention.")
    ffn_dim: int = Field(ge=1, description="Hidden width of the FFN.")
    topology: str = Field(default="siamese", description="Residual topology: name, or name:option=value,option=value.")
    norm: Literal["rms", "layer"] = Field(default="layer", description="Kind of every norm.")
    norm_eps: float = Field(default=1e-6, gt=0, description="Added to the variance in every norm.")
    qk_norm: Literal["none", "head", "projection"] = Field(
        default="none", description="Norm on queries and keys, if the topology asks for none."
    )
    class_dropout: float = Field(
        default=0.1, ge=0, lt=1, description="Share of labels hidden in training; classifier-free guidance needs some."
    )
    learn_sigma: bool = Field(
        default=True,
        description="Whether the model also predicts the variance of a denoising step: twice the channels.",
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout on every sublayer's update.")

    @field_validator("topology")
    @classmethod
    def _known_topology(cls, text: str) -> str:
        name, options = parse_topology(text)
        find_topology(name).options_class.parse(options, name)
        return text

    @model_validator(mode="after")
    def _check(self) -> DiTConfig:
        if self.input_size % self.patch_size:
            raise ValueError(
                f"patch_size = {self.patch_size} is not allowed; it takes a divisor of input_size = {self.input_size}"
            )
        if self.dim % self.heads:
            raise ValueError(f"heads = {self.heads} is not allowed; it takes a divisor of dim = {self.dim}")
        if self.dim % 4:
            raise ValueError(f"dim = {self.dim} is not allowed; positions in two directions take a multiple of 4")
        return self

    @property
    def side(self) -> int:
        """Patches in a row."""
        return self.input_size // self.patch_size

    @property
    def tokens(self) -> int:
        """Patches of an image."""
        return self.side**2

    @property
    def out_channels(self) -> int:
        """Channels of the prediction."""
        return self.channels * (2 if self.learn_sigma else 1)

    @property
    def norms(self) -> Norms:
        """Norms by role: what is modulated, before sublayers and at the end, has no affine of its own."""
        stream, free = NormSpec(self.norm, self.norm_eps), NormSpec(self.norm, self.norm_eps, affine=False)
        return Norms(stream=stream, input=free, final=free)
