"""Diffusion Transformers (DiT) on any topology."""

from siamesenorm.models.dit.config import DiTConfig
from siamesenorm.models.dit.counts import count_dit
from siamesenorm.models.dit.model import DiT
from siamesenorm.models.dit.presets import DIT_PRESETS, dit_preset

__all__ = ["DIT_PRESETS", "DiT", "DiTConfig", "count_dit", "dit_preset"]
