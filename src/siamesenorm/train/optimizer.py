"""AdamW with two groups of parameters: decayed and not.

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
    """The decayed and the other trainable parameters, each with the names of its own; empty groups are left out."""
    embeddings, kept = set(), set()
    for prefix, module in model.named_modules():
        dot = f"{prefix}." if prefix else ""
        if isinstance(module, nn.Embedding):
            embeddings.add(id(module.weight))
        if callable(spared := getattr(module, "no_weight_decay", None)):
            kept |= {f"{dot}{name}" for name in spared()}
    decayed: dict[str, nn.Parameter] = {}
    plain: dict[str, nn.Parameter] = {}
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name in kept:
            wanted = False
        elif id(parameter) in embeddings:
            wanted = config.decay_embeddings
        else:
            wanted = parameter.dim() >= 2 or config.decay_vectors
        (decayed if wanted else plain)[name] = parameter
    groups = (("decayed", decayed, config.weight_decay), ("plain", plain, 0.0))
    return [
        {"name": title, "names": list(members), "params": list(members.values()), "weight_decay": decay}
        for title, members, decay in groups
        if members
    ]


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.AdamW:
    """AdamW over the groups of a model, sharded or not."""
    groups = [
        {"params": group["params"], "weight_decay": group["weight_decay"]} for group in parameter_groups(model, config)
    ]
    return torch.optim.AdamW(
        uniform_groups(groups),
        lr=config.lr,
        betas=(config.beta1, config.beta2),
        eps=config.eps,
        fused=config.fused or None,
    )


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """One learning rate for all groups."""
    for group in optimizer.param_groups:
        group["lr"] = lr
