"""Numbers that change over training: how far branches have grown in (ProRes), and one topology into another (blends).

ProRes (arXiv 2603.05369): every update is multiplied by ``min(t / (T l), 1)`` at step t in block l = 1, 2, …; T is the
option `prores` of every topology. A blend is ``(1 - b) old + b new`` with ``b = (t - 1 - start) / steps``, within 0
and 1.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn


class Ramp(nn.Module):
    """One block's factor: a buffer, so that checkpoints keep it and compiled graphs take it as it is."""

    value: Tensor

    def __init__(self, steps: int, block: int) -> None:
        super().__init__()
        self.steps = steps * (block + 1)
        self.is_set = False
        self.register_buffer("value", torch.empty(()))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Before training."""
        self.value.zero_()
        self.is_set = False

    def at(self, step: int) -> float:
        """The factor at a step, counted from 1."""
        return min(step / self.steps, 1.0)

    def set_step(self, step: int) -> None:
        """Take the factor of a step, counted from 1."""
        self.value.fill_(self.at(step))
        self.is_set = True

    def forward(self) -> Tensor:
        """What multiplies the update."""
        return self.value

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.is_set = True

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"steps={self.steps}"


class Share(Ramp):
    """b: how much of the new there is; 0 up to the step behind `start`, 1 from `steps` further on."""

    def __init__(self, start: int, steps: int) -> None:
        super().__init__(steps, 0)
        self.start = start

    def at(self, step: int) -> float:
        """b at a step, counted from 1."""
        return min(max((step - 1 - self.start) / self.steps, 0.0), 1.0)

    def blend(self, old: Tensor, new: Tensor) -> Tensor:
        """(1 - b) old + b new: exactly the one or the other at the ends."""
        b = self().to(old.dtype)
        return (1 - b) * old + b * new


class Growing(nn.Module):
    """A norm that grows in: (1 - b) x + b N x."""

    def __init__(self, norm: nn.Module, share: Share) -> None:
        super().__init__()
        self.norm, self.share = norm, share

    def forward(self, x: Tensor) -> Tensor:
        """x, N x or what lies between."""
        return self.share.blend(x, self.norm(x))


def ramps_of(model: nn.Module) -> list[Ramp]:
    """Every number in a model that changes with the step."""
    return [module for module in model.modules() if isinstance(module, Ramp)]
