"""`DiT` as a model of diffusers: its configuration as config.json, its weights as safetensors."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import Tensor

from siamesenorm.errors import InteropError
from siamesenorm.models.dit import DiT, DiTConfig


class ResidualDiTModel(ModelMixin, ConfigMixin):
    """A diffusion Transformer on any topology; its settings are those of `DiTConfig`.

    ::

        model = ResidualDiTModel(**config.model_dump())
        model(sample, timestep, class_labels).sample
    """

    _supports_gradient_checkpointing = False

    @register_to_config  # type: ignore[untyped-decorator]  # diffusers' own
    def __init__(
        self,
        input_size: int = 32,
        patch_size: int = 2,
        channels: int = 4,
        classes: int = 1000,
        dim: int = 768,
        blocks: int = 12,
        heads: int = 12,
        ffn_dim: int = 3072,
        topology: str = "siamese",
        norm: str = "layer",
        norm_eps: float = 1e-6,
        qk_norm: str = "none",
        parametrization: str = "standard",
        base_width: int | None = None,
        base_depth: int | None = None,
        class_dropout: float = 0.1,
        learn_sigma: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        given = {name: self.config[name] for name in DiTConfig.model_fields}
        self.dit = DiT(DiTConfig.model_validate(given))

    @classmethod
    def from_config(cls, config: Any = None, *args: Any, **kwargs: Any) -> Any:
        """As diffusers has it, but the configuration of another model is refused: its fields would be ignored."""
        if isinstance(config, Mapping):
            said = config.get("_class_name", cls.__name__)
            unknown = [name for name in config if not name.startswith("_") and name not in DiTConfig.model_fields]
            if said != cls.__name__:
                raise InteropError(f"config: _class_name {said!r} is not allowed; it takes {cls.__name__!r}")
            if unknown:
                raise InteropError(f"config: {unknown[0]} = {config[unknown[0]]!r} is no field of a {cls.__name__}")
        return super().from_config(config, *args, **kwargs)

    @classmethod
    def from_pretrained(cls, *args: Any, output_loading_info: bool = False, **kwargs: Any) -> Any:
        """As diffusers has it, but a weight that is missing or has no place is refused instead of left out."""
        model, info = super().from_pretrained(*args, output_loading_info=True, **kwargs)
        for what in ("missing", "unexpected"):
            if found := sorted(info[f"{what}_keys"]):
                raise InteropError(f"weights: {len(found)} are {what} for a {cls.__name__}, such as {found[0]!r}")
        return (model, info) if output_loading_info else model

    @classmethod
    def of(cls, model: DiT) -> ResidualDiTModel:
        """The same model, whose weights are shared."""
        with torch.device("meta"):
            made = cls(**model.config.model_dump(mode="json"))
        made.dit = model
        return made

    def forward(
        self, sample: Tensor, timestep: Tensor, class_labels: Tensor, return_dict: bool = True
    ) -> Transformer2DModelOutput | tuple[Tensor]:
        """The prediction for noisy images (batch, channels, size, size); timesteps and labels are (batch,)."""
        predicted = self.dit(sample, timestep, class_labels)
        return Transformer2DModelOutput(sample=predicted) if return_dict else (predicted,)
