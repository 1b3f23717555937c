"""LoRA (arXiv 2106.09685): a frozen linear layer and a change of low rank that is trained in its place.

    y = W x + bias + alpha / rank · B (A x)

A (rank × in) is drawn, B (out × rank) starts at zero, so that the start is exactly the layer. A fused matrix has one
pair of factors: q, k and v share A and have rows of B of their own, as have SwiGLU's value and gate.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from siamesenorm.layers.linear import Linear, linear

FACTORS = ("lora_A", "lora_B")
"""Names of the two parameters."""


class LoraLinear(Linear):
    """A linear layer, which keeps its own parameters and their names, with two factors beside them."""

    def __init__(self, base: nn.Linear, rank: int, alpha: float) -> None:
        nn.Module.__init__(self)
        self.in_features, self.out_features = base.in_features, base.out_features
        self.weight = base.weight
        self.register_parameter("bias", base.bias)
        self.rank, self.scale = rank, alpha / rank
        self.lora_A = nn.Parameter(base.weight.new_empty(rank, base.in_features))
        self.lora_B = nn.Parameter(base.weight.new_zeros(base.out_features, rank))

    def forward(self, input: Tensor) -> Tensor:
        """(..., in) to (..., out)."""
        change = F.linear(F.linear(input, self.lora_A), self.lora_B)
        return linear(input, self.weight, self.bias) + self.scale * change

    def first_factors(self, seed: int, name: str) -> dict[str, Tensor]:
        """What the factors start with: a function of the seed and the layer's name alone."""
        digest = hashlib.sha256(f"{seed} {name}".encode()).digest()
        generator = torch.Generator().manual_seed(int.from_bytes(digest[:7], "little"))
        bound = 1 / math.sqrt(self.in_features)
        drawn = torch.empty(self.rank, self.in_features).uniform_(-bound, bound, generator=generator)
        return {"lora_A": drawn, "lora_B": torch.zeros(self.out_features, self.rank)}

    def hidden_matrices(self) -> dict[str, int]:
        """Weights by name, and the rows of one matrix in each."""
        return {"lora_A": self.rank, "lora_B": self.out_features}


class Merging(NamedTuple):
    """A weight and the factors that go into it, by name."""

    weight: str
    a: str
    b: str
    scale: float


def mergings(model: nn.Module) -> Iterator[Merging]:
    """What is to be merged in a model."""
    for name, module in model.named_modules():
        if isinstance(module, LoraLinear):
            dot = f"{name}." if name else ""
            yield Merging(f"{dot}weight", f"{dot}lora_A", f"{dot}lora_B", module.scale)


@torch.no_grad()
def merged(tensors: Mapping[str, Tensor], pairs: Iterator[Merging]) -> dict[str, Tensor]:
    """Weights with their changes in them, and no factors."""
    found = dict(tensors)
    for pair in pairs:
        a, b, weight = found.pop(pair.a), found.pop(pair.b), found[pair.weight]
        found[pair.weight] = (weight.double() + pair.scale * (b.double() @ a.double())).to(weight.dtype)
    return found


def is_factor(name: str) -> bool:
    """Whether a parameter of this name is a factor."""
    return name.rpartition(".")[2] in FACTORS
