"""`DiT` as a model of diffusers: its configuration as config.json, its weights as safetensors."""

from __future__ import annotations

import torch
from diffusers import ConfigMixin, ModelMixin
from diffusers.configuration_utils import register_to_config
from diffusers.models.modeling_outputs import Transformer2DModelOutput
from torch import Tensor

from siamesenorm.models.dit import DiT
from siamesenorm.models.dit_config import DiTConfig


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
        class_dropout: float = 0.1,
        learn_sigma: bool = True,
        dropout: float = 0.0,
    ) -> None:
        super().__init__()
        given = {name: self.config[name] for name in DiTConfig.model_fields}
        self.dit = DiT(DiTConfig.model_validate(given))

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
