"""AdamW with groups of parameters: decayed and not, and by the factors that topologies put on learning rates.

| parameter                                   | decayed                     |
|---------------------------------------------|-----------------------------|
| matrices of sublayers and head              | yes                         |
| embeddings, and a head tied to one          | ``decay_embeddings``        |
| norm gains, biases, other vectors, scalars  | ``decay_vectors``           |
| what modules name in `no_weight_decay`      | no                          |
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from siamesenorm.train.config import OptimizerConfig
from siamesenorm.train.parallel import uniform_groups


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """The decayed and the other trainable parameters by their factor on the learning rate, with the names of each."""
    embeddings, kept = set(), set()
    factors: dict[str, float] = {}
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        if isinstance(module, nn.Embedding):
            embeddings.add(id(module.weight))
        if callable(spared := getattr(module, "no_weight_decay", None)):
            kept |= {f"{dot}{name}" for name in spared()}
        if config.lr_factors and callable(rates := getattr(module, "learning_rates", None)):
            factors |= {f"{dot}{name}": factor for name, factor in rates().items()}
    members: dict[tuple[bool, float], dict[str, nn.Parameter]] = {(True, 1.0): {}, (False, 1.0): {}}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name in kept:
            wanted = False
        elif id(parameter) in embeddings:
            wanted = config.decay_embeddings
        else:
            wanted = parameter.dim() >= 2 or config.decay_vectors
        members.setdefault((wanted, factors.get(name, 1.0)), {})[name] = parameter
    return [
        {
            "name": ("decayed" if wanted else "plain") + ("" if factor == 1 else f" x {factor:g}"),
            "names": list(parameters),
            "params": list(parameters.values()),
            "weight_decay": config.weight_decay if wanted else 0.0,
            "lr_factor": factor,
        }
        for (wanted, factor), parameters in members.items()
        if parameters
    ]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the groups of a model, sharded or not."""
    wanted = ("params", "weight_decay", "lr_factor")
    groups = uniform_groups({key: group[key] for key in wanted} for group in parameter_groups(model, config))
    factors = [group.pop("lr_factor") for group in groups]
    optimizer = torch.optim.AdamW(
        groups, lr=config.lr, betas=(config.beta1, config.beta2), eps=config.eps, fused=config.fused or None
    )
    optimizer.lr_factors = factors  # type: ignore[attr-defined]  # beside its groups, which checkpoints hold
    return optimizer


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """One learning rate for all groups, times each one's factor."""
    for group, factor in zip(optimizer.param_groups, optimizer.lr_factors, strict=True):  # type: ignore[attr-defined]
        group["lr"] = lr * factor
