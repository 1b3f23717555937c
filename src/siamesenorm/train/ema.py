"""Averaged weights: after every step ``average = d · average + (1 - d) · weights``, beginning with the first ones.

With a warm-up d is ``min(decay, s / (s + 9))`` at step s. Without one it is the decay from the first step on, so that
the first, random weights still count ``decay**s`` after s steps: 37 % after 10 000 at .9999.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from siamesenorm.train.parallel.gradients import by_mesh

LAG = 9
"""A rising average reaches back over a ninth of the steps so far; (1 + t) / (10 + t) in code that counts from 0."""


def decay_at(step: int, decay: float, warmup: bool) -> float:
    """What the average keeps of itself at a 1-based step: a pure function, so that there is nothing to save."""
    return min(decay, step / (step + LAG)) if warmup else decay


class WeightAverage:
    """A second set of a model's weights, in float32 beside the first."""

    def __init__(self, model: nn.Module, decay: float, *, warmup: bool = True) -> None:
        self.model, self.decay, self.warmup = model, decay, warmup
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.average: dict[str, Tensor] = {name: p.detach().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self, step: int) -> None:
        """Take the weights of a finished step in; steps count from 1."""
        share = 1 - decay_at(step, self.decay, self.warmup)
        weights = by_mesh(parameter.detach() for parameter in self._parameters.values())
        for averages, part in zip(by_mesh(self.average.values()), weights, strict=True):
            torch._foreach_lerp_(averages, part, share)

    @contextlib.contextmanager
    def applied(self) -> Iterator[None]:
        """The model has the averaged weights while the block runs."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for module in self.model.modules():
            if isinstance(module, FSDPModule):
                module.reshard()  # what a pass has left gathered is a copy, which would outlive the change
        for name, parameter in self._parameters.items():
            kept = parameter.detach().clone()
            parameter.copy_(self.average[name])
            self.average[name].copy_(kept)
