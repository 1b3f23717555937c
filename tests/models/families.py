"""A tiny model of every family, far from its start, with inputs and a smooth loss: for tests that sweep over all."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from siamesenorm.models.dit import DiT, DiTConfig
from siamesenorm.models.lm import LanguageModel, LMConfig
from siamesenorm.models.vit import VisionTransformer, ViTConfig

STACK = {"dim": 8, "blocks": 2, "heads": 2, "ffn_dim": 12}
IMAGE = {"channels": 1, "classes": 3, "patch_size": 2}
MOE = {"experts": 3, "top_k": 2, "expert_dim": 6}
WORDS = 11


class Logits(nn.Module):
    """A language model as a function of tensors alone."""

    def __init__(self, model: LanguageModel) -> None:
        super().__init__()
        self.model = model

    def forward(self, ids: Tensor) -> Tensor:
        return self.model(ids).logits


@dataclass
class Family:
    """How a model is made, and what it is given."""

    make: Callable[[str], nn.Module]
    inputs: Callable[[int], tuple[Tensor, ...]]
    """Inputs of so many rows."""
    loss: Callable[[nn.Module, torch.dtype], Tensor]

    def model(self, topology: str = "siamese", dtype: torch.dtype = torch.float64, spread: float = 0.2) -> nn.Module:
        """The same numbers for the same topology, whatever the dtype."""
        model = self.make(topology).double().eval()
        generator = torch.Generator().manual_seed(1)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += spread * torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
        return model.to(dtype)


def language(**changes) -> Family:
    fields = {**STACK, "vocab_size": WORDS, "kv_heads": 1, "max_length": 16, **changes}
    ids = torch.randint(0, WORDS, (3, 6), generator=torch.Generator().manual_seed(0))
    return Family(
        lambda topology: LanguageModel(LMConfig(**fields, topology=topology), seed=0),
        lambda rows: (torch.randint(0, WORDS, (rows, 5)),),
        lambda model, dtype: model(ids[:2, :-1], labels=ids[:2, 1:]).loss,
    )


IMAGES = torch.randn(2, 1, 4, 4, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def labelled(rows: int) -> tuple[Tensor, Tensor, Tensor]:
    return torch.randn(rows, 1, 4, 4), torch.randint(0, 1000, (rows,)), torch.randint(0, 3, (rows,))


FAMILIES = {
    "lm": language(),
    "lm with experts": language(moe=MOE),
    "vit": Family(
        lambda topology: VisionTransformer(ViTConfig(**STACK, **IMAGE, image_size=4, topology=topology), seed=0),
        lambda rows: (torch.randn(rows, 1, 4, 4),),
        lambda model, dtype: model(IMAGES.to(dtype)).sin().sum(),
    ),
    "dit": Family(
        lambda topology: DiT(DiTConfig(**STACK, **IMAGE, input_size=4, topology=topology), seed=0),
        labelled,
        lambda model, dtype: model(IMAGES.to(dtype), torch.tensor([3, 700]), torch.tensor([0, 2])).sin().sum(),
    ),
}


def callable_form(model: nn.Module) -> nn.Module:
    """A module from tensors to a tensor, as tracers want it."""
    return Logits(model).eval() if isinstance(model, LanguageModel) else model
