"""Language models: decoder-only Transformers on any topology, dense or with experts, and text from them."""

from siamesenorm.models.lm.config import LMConfig, MoEConfig, RopeScaling
from siamesenorm.models.lm.counts import count_lm
from siamesenorm.models.lm.generation import Sampling, generate, stream
from siamesenorm.models.lm.model import LanguageModel, LMOutput
from siamesenorm.models.lm.presets import PRESETS, preset

__all__ = [
    "PRESETS",
    "LMConfig",
    "LMOutput",
    "LanguageModel",
    "MoEConfig",
    "RopeScaling",
    "Sampling",
    "count_lm",
    "generate",
    "preset",
    "stream",
]
