"""The diffusion Transformer's configuration: typed, frozen, documented, round-trips through dict and JSON."""

from __future__ import annotations

from pydantic import Field, model_validator

from siamesenorm.errors import FieldError
from siamesenorm.models.stack_config import StackConfig
from siamesenorm.residual import Norms, NormSpec
from siamesenorm.residual.norms import NormKind


class DiTConfig(StackConfig):
    """Everything that decides a diffusion Transformer's function and its first weights."""

    input_size: int = Field(ge=1, description="Height and width of an image, or of its latent.")
    patch_size: int = Field(ge=1, description="Height and width of a patch, which is one token.")
    channels: int = Field(ge=1, description="Channels of an image, or of its latent.")
    classes: int = Field(ge=1, description="Classes; label `classes` itself stands for none of them.")
    norm: NormKind = Field(
        default="layer", description="Kind of every norm: rms, layer, or gated (GatedNorm; norms in sublayers are rms)."
    )
    norm_eps: float = Field(default=1e-6, gt=0, description="Added to the variance in every norm.")
    class_dropout: float = Field(
        default=0.1, ge=0, lt=1, description="Share of labels hidden in training; classifier-free guidance needs some."
    )
    learn_sigma: bool = Field(
        default=True,
        description="Whether the model also predicts the variance of a denoising step: twice the channels.",
    )
    dropout: float = Field(default=0.0, ge=0, lt=1, description="Dropout on every sublayer's update.")

    @model_validator(mode="after")
    def _check(self) -> DiTConfig:
        if self.input_size % self.patch_size:
            raise FieldError.not_allowed(
                "patch_size =", self.patch_size, f"a divisor of input_size = {self.input_size}"
            )
        self.check_heads()
        if self.dim % 4:
            raise FieldError.refused("dim =", self.dim, "positions in two directions take a multiple of 4")
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
