"""AdamW or Muon with groups of parameters: decayed and not, and by the factors that topologies put on learning rates.

| parameter                                   | decayed                     | with ``kind: muon`` by |
|---------------------------------------------|-----------------------------|------------------------|
| matrices of attention, FFN and experts, and factors of LoRA | yes         | Muon                   |
| other matrices: head, router, topologies'   | yes                         | AdamW                  |
| embeddings, and a head tied to one          | ``decay_embeddings``        | AdamW                  |
| norm gains, biases, other vectors, scalars  | ``decay_vectors``           | AdamW                  |
| what modules name in `no_weight_decay`      | no                          |                        |
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn

from siamesenorm.errors import ConfigError
from siamesenorm.models.parametrization import Factors, parameter_factors
from siamesenorm.train.config import OptimizerConfig
from siamesenorm.train.muon import Fused, Muon
from siamesenorm.train.parallel import uniform_groups
from siamesenorm.train.tensor_layout import plain_name, row_orders, unwrap

LR_FACTORS = "lr_factors"
"""Attribute of an optimiser, in the order of its groups: beside these, which checkpoints hold."""


def parameter_groups(model: nn.Module, config: OptimizerConfig) -> list[dict[str, Any]]:
    """Trainable parameters by who updates them, decayed or not, and their factor on the learning rate; with names."""
    matrices = hidden_matrices(model) if config.kind == "muon" else {}
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
    by_size = parameter_factors(unwrap(model), matrices)
    members: dict[tuple[bool, bool, Factors], dict[str, nn.Parameter]] = {
        (False, True, Factors()): {},
        (False, False, Factors()): {},
    }
    for name, parameter in model.named_parameters():
        if not parameter.requires_grad:
            continue
        if name in kept:
            wanted = False
        elif id(parameter) in embeddings:
            wanted = config.decay_embeddings
        else:
            wanted = parameter.dim() >= 2 or config.decay_vectors
        own = by_size.get(parameter, Factors())
        own = own._replace(lr=own.lr * factors.get(name, 1.0))
        if not wanted:  # a decay of 0 is 0 times anything
            own = own._replace(decay=1.0)
        if parameter in matrices:
            own = own._replace(eps=1.0)
        members.setdefault((parameter in matrices, wanted, own), {})[name] = parameter
    return [
        {
            "name": ("muon " if muon else "") + ("decayed" if wanted else "plain") + _times(factor.lr),
            "names": list(parameters),
            "params": list(parameters.values()),
            "weight_decay": config.weight_decay * factor.decay if wanted else 0.0,
            "eps": config.eps * factor.eps,
            "lr_factor": factor.lr,
            "muon": muon,
        }
        for (muon, wanted, factor), parameters in members.items()
        if parameters
    ]


def _times(factor: float) -> str:
    return "" if factor == 1 else f" x {factor:g}"


def hidden_matrices(model: nn.Module) -> dict[nn.Parameter, Fused]:
    """The parameters that Muon updates, as the sublayers say, and how matrices lie in each."""
    orders = dict(row_orders(model))
    return {
        module.get_parameter(name): Fused(rows, orders.get(plain_name(f"{prefix}.{name}")))
        for prefix, module in unwrap(model).named_modules()
        if callable(matrices := getattr(module, "hidden_matrices", None))
        for name, rows in matrices().items()
    }


def build_optimizer(model: nn.Module, config: OptimizerConfig) -> torch.optim.Optimizer:
    """The optimiser over the groups of a model, sharded or not."""
    wanted = ("params", "weight_decay", "eps", "lr_factor", "muon")
    groups = uniform_groups({key: group[key] for key in wanted} for group in parameter_groups(model, config))
    groups.sort(key=lambda group: group["muon"])  # as the optimiser has them
    factors = [group.pop("lr_factor") for group in groups]
    betas = (config.beta1, config.beta2)
    adamw = functools.partial(torch.optim.AdamW, lr=config.lr, betas=betas, eps=config.eps, fused=config.fused or None)
    hidden = [group for group in groups if group["muon"]]
    others = [{key: group[key] for key in ("params", "weight_decay", "eps")} for group in groups if not group["muon"]]
    optimizer: torch.optim.Optimizer
    if config.kind == "adamw":
        optimizer = adamw(others)
    elif hidden:
        optimizer = Muon(hidden, others, hidden_matrices(model), adamw, lr=config.lr, momentum=config.momentum)
    elif hidden_matrices(model):
        raise ConfigError.not_allowed(
            "optimizer.kind",
            "muon",
            "adamw",
            when="with this train.parameters, which has no matrix of attention or FFN for it",
        )
    else:
        raise ConfigError.not_allowed(
            "optimizer.kind",
            "muon",
            "models with sublayers that name their matrices (hidden_matrices)",
            when=f"for {type(unwrap(model)).__name__}",
        )
    setattr(optimizer, LR_FACTORS, factors)
    return optimizer


def set_lr(optimizer: torch.optim.Optimizer, lr: float) -> None:
    """One learning rate for all groups, times each one's factor."""
    for group, factor in zip(optimizer.param_groups, getattr(optimizer, LR_FACTORS), strict=True):
        group["lr"] = lr * factor
