"""The small models that the tests of this folder share."""

import torch

from siamesenorm.models.lm import LanguageModel, LMConfig
from siamesenorm.residual import TOPOLOGIES

ALL = [*TOPOLOGIES, "siamese:form=plain", "siamese:form=hybrid_pre", "post:norm_at=end", "hyper:dynamic=false"]


def config(topology="siamese", **changes):
    fields = {"vocab_size": 50, "dim": 32, "blocks": 3, "heads": 4, "kv_heads": 2, "ffn_dim": 48, "max_length": 64}
    return LMConfig(**{**fields, "topology": topology, **changes})


def stirred(topology="siamese", seed=0, **changes):
    """A model far from its start: large weights, every gain moved, so that a lost term shows."""
    large = {"init": "normal", "init_std": 0.2, "first_logits": "small"}  # all but the logits, which are compared
    model = LanguageModel(config(topology, **large, **changes), seed=seed).eval()
    generator = torch.Generator().manual_seed(seed + 1)
    for parameter in model.residual_parameters().values():
        parameter.data += 0.2 * torch.randn(parameter.shape, generator=generator)
    return model
