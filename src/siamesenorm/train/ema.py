"""Averaged weights: after every step ``average = decay · average + (1 - decay) · weights``, from the first ones on."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from siamesenorm.train.parallel import by_mesh


class WeightAverage:
    """A second set of a model's weights, in float32 beside the first."""

    def __init__(self, model: nn.Module, decay: float) -> None:
        self.decay = decay
        self._parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.average: dict[str, Tensor] = {name: p.detach().clone() for name, p in self._parameters.items()}

    @torch.no_grad()
    def update(self) -> None:
        """Take the weights of a finished step in."""
        weights = by_mesh(parameter.detach() for parameter in self._parameters.values())
        for averages, part in zip(by_mesh(self.average.values()), weights, strict=True):
            torch._foreach_lerp_(averages, part, 1 - self.decay)

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
        for name, parameter in self._parameters.items():
            kept = parameter.detach().clone()
            parameter.copy_(self.average[name])
            self.average[name].copy_(kept)
