"""`LanguageModel` to transformers and back, without copying a weight."""

from __future__ import annotations

from typing import Any

import torch

from siamesenorm.interop.huggingface.configuration import SiameseNormConfig
from siamesenorm.interop.huggingface.modeling import SiameseNormForCausalLM
from siamesenorm.interop.huggingface.sharing import kept_tensors, transformers_name
from siamesenorm.models.lm import LanguageModel


def from_language_model(model: LanguageModel, **config: Any) -> SiameseNormForCausalLM:
    """The same model for transformers; both share one set of weights.

    config: further fields of its `SiameseNormConfig`, such as ``eos_token_id``.
    """
    with torch.device("meta"):
        made = SiameseNormForCausalLM(SiameseNormConfig.from_lm_config(model.config, **config))
    made.config.dtype = model.embedding.weight.dtype
    for name, tensor in kept_tensors(model).items():
        module, _, leaf = transformers_name(name).rpartition(".")
        setattr(made.get_submodule(module), leaf, tensor)
    made.tie_weights()
    return made.train(model.training)


def to_language_model(model: SiameseNormForCausalLM) -> LanguageModel:
    """The same model as a `LanguageModel`; both share one set of weights."""
    return model.to_language_model()
