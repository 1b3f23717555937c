"""Models for tests of inspection: tiny language models, and stacks of plain functions with known outputs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from siamesenorm import Residual
from siamesenorm.models.lm import LanguageModel, LMConfig
from siamesenorm.residual import TOPOLOGIES, NormSpec

FORMS = ["siamese:form=plain", "siamese:form=hybrid_pre", "siamese:x=span,y=scaled", "mhc:collapse=learned"]
FORMS += ["siamese:y=gr", "siamese:y=attnres", "siamese:y=dense", "siamese:y=x0", "attnres:blocks=0"]
SPECS = [*TOPOLOGIES, *FORMS]
SINGLE = [name for name, found in TOPOLOGIES.items() if found.streams.startswith("1")]


def tiny_lm(topology: str = "siamese", blocks: int = 2, **changes: Any) -> LanguageModel:
    """Every parameter away from its start value, so that no gain is 1 and no branch is closed."""
    shape = {"vocab_size": 32, "dim": 16, "blocks": blocks, "heads": 4, "ffn_dim": 24}
    model = LanguageModel(LMConfig(**{**shape, "topology": topology, **changes}), seed=0)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * torch.randn(parameter.shape, generator=generator))
    return model


def ids(rows: int = 3, tokens: int = 13) -> Tensor:
    return torch.randint(0, 32, (rows, tokens), generator=torch.Generator().manual_seed(2))


class Stack(nn.Module):
    """A topology with given functions as sublayers."""

    def __init__(self, topology: str, dim: int, sublayers: Sequence[Callable[[Tensor], Tensor]]) -> None:
        super().__init__()
        blocks = [("attention", "ffn")] * (len(sublayers) // 2)
        self.residual = Residual(topology, dim, blocks, norm=NormSpec(eps=1e-12), needs="waived")
        self.sublayers = list(sublayers)

    def forward(self, x: Tensor) -> Tensor:
        return self.residual(x, self.sublayers)


def set_gains(norm: nn.Module, value: float) -> None:
    with torch.no_grad():
        norm.weight.fill_(value)
