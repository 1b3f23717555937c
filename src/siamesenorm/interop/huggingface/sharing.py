"""One set of weights in both models: `LanguageModel`'s names and transformers', and a `LanguageModel` made of them."""

from __future__ import annotations

import torch
from torch import nn

from siamesenorm.interop.huggingface.configuration import SiameseNormConfig
from siamesenorm.models.lm.model import LanguageModel


def transformers_name(name: str) -> str:
    """The name in `SiameseNormForCausalLM` of a parameter of `LanguageModel`."""
    first, _, rest = name.partition(".")
    places = {"head": "lm_head", "embedding": "model.embed_tokens", "blocks": "model.layers"}
    return f"{places.get(first, f'model.{first}')}.{rest}"


def kept_tensors(model: nn.Module) -> dict[str, torch.Tensor]:
    """What a model's file of weights holds, each tensor once: its parameters, and the buffers that are kept."""
    saved = model.state_dict()
    buffers = {name: buffer for name, buffer in model.named_buffers() if name in saved}
    return {**dict(model.named_parameters()), **buffers}


def assemble(config: SiameseNormConfig, base: nn.Module, head: nn.Linear | None) -> LanguageModel:
    """A `LanguageModel` on the very parameters of `base` and `head`; without a head, an untied one stays empty."""
    with torch.device("meta"):
        model = LanguageModel(config.to_lm_config())
    theirs: dict[str, torch.Tensor] = {
        f"model.{name}": parameter for name, parameter in base.named_parameters(remove_duplicate=False)
    }
    theirs |= {f"model.{name}": buffer for name, buffer in base.named_buffers()}
    if head is not None:
        theirs |= {f"lm_head.{name}": parameter for name, parameter in head.named_parameters()}
    for name in kept_tensors(model):
        parameter = theirs.get(transformers_name(name))
        if parameter is None and name != "head.weight":
            raise ValueError(f"{transformers_name(name)} is missing: merge adapters and undo quantisation first")
        if parameter is not None:
            module, _, leaf = name.rpartition(".")
            setattr(model.get_submodule(module), leaf, parameter)
    return model.train(base.training)
