"""A tiny language model and the plainest training loop there is, for tests of what goes around them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from siamesenorm.models.lm import LanguageModel, LMConfig
from siamesenorm.train.config import OptimizerConfig
from siamesenorm.train.distributed import World
from siamesenorm.train.optimizer import build_optimizer, set_lr
from siamesenorm.train.parallel import clip_gradients, uniform_groups
from siamesenorm.train.parallel.parallelize import Spreading
from siamesenorm.train.parallel.pipeline import Pipeline

BATCH = 4
CONFIGS: dict[str, dict[str, Any]] = {
    "siamese": {},
    "hybrid": {"topology": "siamese:form=hybrid_pre"},  # norms on every head of q, k and v
    "subln": {
        "topology": "subln",
        "qk_norm": "projection",
        "kv_heads": 2,
    },  # norms over split features, grouped queries
    "experts": {"moe": {"experts": 4, "top_k": 2, "expert_dim": 12, "balance_weight": 0.1, "z_weight": 0.1}},
    "wide_experts": {  # biases, and a norm that all experts share
        "topology": "subln",
        "bias": True,
        "moe": {"experts": 6, "top_k": 3, "expert_dim": 12, "balance_weight": 0.1, "normalize_top_k": True},
    },
    "hyper": {"topology": "hyper", "norm": "layer", "bias": True, "tied": True, "activation": "gelu"},
    "learned": {  # positions by table, rows of the vocabulary that do not divide evenly, a loss of log Z
        "topology": "peri",
        "vocab_size": 33,
        "learned_positions": True,
        "max_length": 16,
        "z_weight": 0.01,
    },
    "completep": {"parametrization": "completep", "base_width": 4, "base_depth": 1},  # deeper and wider
}


def tiny_model(name: str = "siamese", seed: int = 0, **changes: Any) -> LanguageModel:
    """One of `CONFIGS`, or the model of that name's topology."""
    base = {"vocab_size": 32, "dim": 16, "blocks": 2, "heads": 4, "ffn_dim": 24}
    return LanguageModel(LMConfig(**{**base, **CONFIGS.get(name, {"topology": name}), **changes}), seed=seed)


@contextlib.contextmanager
def watched_whole() -> Iterator[list[int]]:
    """How many numbers of a model are there and not sharded, whenever one of its parts is about to be spread."""
    seen: list[int] = []
    part = Spreading.part

    def look(spreading: Spreading, module: nn.Module) -> None:
        parameters = spreading.model.parameters()
        seen.append(sum(p.numel() for p in parameters if not p.is_meta and not isinstance(p, DTensor)))
        part(spreading, module)

    Spreading.part = look  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        Spreading.part = part  # type: ignore[method-assign]


def batch(step: int) -> Tensor:
    """The global batch of a step."""
    return torch.randint(0, 32, (BATCH, 9), generator=torch.Generator().manual_seed(1000 + step))


class TinyRun:
    """Model, optimiser and steps. Dropout-like noise from torch's generator makes random states matter."""

    def __init__(
        self,
        model: nn.Module,
        world: World | None = None,
        *,
        noisy: bool = False,
        kind: str = "",
        parts: int = 1,
        ranks: int = 1,
    ) -> None:
        """parts: micro-batches. ranks: one process takes the rows of so many together, part by part."""
        self.model, self.world, self.noisy, self.done = model, world or World(), noisy, 0
        self.parts, self.ranks = parts, ranks
        if kind:
            self.optimizer: torch.optim.Optimizer = build_optimizer(model, OptimizerConfig(kind=kind, lr=1.0))  # type: ignore[arg-type]
            set_lr(self.optimizer, 1e-2)
            return
        groups = uniform_groups([{"params": [p for p in model.parameters() if p.requires_grad]}])
        self.optimizer = torch.optim.AdamW(groups, lr=1e-2, fused=True)

    def step(self) -> tuple[float, float]:
        """Loss over all processes, and the norm of all gradients."""
        part = BATCH // self.world.data_size
        mine = batch(self.done)[self.world.data_rank * part :][:part]
        if self.noisy:
            mine = torch.where(torch.rand(mine.shape) < 0.2, 0, mine)
        loss = self.gradients(mine)
        norm = clip_gradients(self.model, 0.5)
        self.optimizer.step()
        self.optimizer.zero_grad()
        self.done += 1
        return self.world.mean({"loss": loss.item()})["loss"], norm.item()

    def gradients(self, rows: Tensor) -> Tensor:
        """The mean loss of the parts, and gradients of it."""
        shares = [1 / self.parts] * self.parts
        if isinstance(self.model, Pipeline):
            sides = {"input_ids": rows[:, :-1].contiguous(), "labels": rows[:, 1:].contiguous()}
            outputs = self.model.gradients(sides, shares, lambda loss: loss)
            return torch.stack([output.loss for output in outputs]).mean()
        total = torch.zeros(())
        for part in rows.unflatten(0, (self.ranks, self.parts, -1)).transpose(0, 1).flatten(1, 2):
            loss = self.model(part[:, :-1], labels=part[:, 1:]).loss / self.parts
            loss.backward()
            total = total + loss.detach()
        return total

    def steps(self, count: int) -> list[tuple[float, float]]:
        return [self.step() for _ in range(count)]

    @property
    def state(self) -> dict[str, Any]:
        return {"model": self.model, "optimizer": self.optimizer, "progress": {"step": self.done}, "tensors": {}}
