"""Tiny models for the Hugging Face tests."""

import torch

from siamesenorm.interop.huggingface import SiameseNormConfig, SiameseNormForCausalLM
from siamesenorm.models.lm import LanguageModel, LMConfig

VOCABULARY = 67
HYBRID = "siamese:form=hybrid_pre"
SIZE = {"vocab_size": VOCABULARY, "dim": 16, "blocks": 3, "heads": 4, "kv_heads": 2, "ffn_dim": 24, "max_length": 64}


def lm_config(topology: str = "siamese", **fields) -> LMConfig:
    return LMConfig(**{**SIZE, "topology": topology, **fields})


def language_model(topology: str = "siamese", **fields) -> LanguageModel:
    """A model whose every parameter differs from its neighbours: gains at 1 would hide a mix-up."""
    model = LanguageModel(lm_config(topology, **fields), seed=1)
    generator = torch.Generator().manual_seed(2)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.1 * torch.randn(parameter.shape, generator=generator)
    return model.eval()


def causal_lm(topology: str = "siamese", *, config: dict | None = None, **fields) -> SiameseNormForCausalLM:
    torch.manual_seed(1)
    special = {"pad_token_id": 0, "eos_token_id": VOCABULARY - 1, **(config or {})}
    return SiameseNormForCausalLM(SiameseNormConfig.from_lm_config(lm_config(topology, **fields), **special)).eval()


def tokens(batch: int = 2, length: int = 11, seed: int = 0) -> torch.Tensor:
    return torch.randint(1, VOCABULARY - 1, (batch, length), generator=torch.Generator().manual_seed(seed))
