"""ProRes: branches that grow in over training, shallow blocks first. arXiv 2603.05369.

Every update is times ``min(t / (T l), 1)`` at step t in block l = 1, 2, …; T is the option `prores` of every topology.
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

    def set_step(self, step: int) -> None:
        """The factor at a step, counted from 1."""
        self.value.fill_(min(step / self.steps, 1.0))
        self.is_set = True

    def forward(self) -> Tensor:
        """What the update is times."""
        return self.value

    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)
        self.is_set = True

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"steps={self.steps}"
