"""Vision Transformers (DeiT) on any topology."""

from siamesenorm.models.vit.config import ViTConfig
from siamesenorm.models.vit.counts import count_vit
from siamesenorm.models.vit.model import VisionTransformer
from siamesenorm.models.vit.presets import VIT_PRESETS, deit, vit_preset

__all__ = ["VIT_PRESETS", "ViTConfig", "VisionTransformer", "count_vit", "deit", "vit_preset"]
