"""What each stream has in a sum of streams: at a sublayer's reading, and in the stack's output."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from siamesenorm.residual.frozen import images


@dataclass(frozen=True)
class Sum:
    """``finish(sum(parts))``, the parts in the order of the topology's named streams."""

    parts: list[Tensor]
    """(..., dim) of each stream; zero of one that is not in the sum."""
    gains: list[float]
    """Mean size of the factor that each stream comes in with: a norm's gains, a mixing weight."""
    norm: nn.Module | None = None
    """What the sum goes through."""

    def finish(self, x: Tensor) -> Tensor:
        """The sum, or some of it, through the norm that follows."""
        return x if self.norm is None else self.norm(x)

    def finished(self) -> Sum:
        """The same without a norm behind it: parts that add up to the result, the norm taken as it is at the sum."""
        if self.norm is None:
            return self
        return Sum(images(self.norm, self.parts), [gain * mean_gain(self.norm) for gain in self.gains])

    @classmethod
    def weighed(cls, weights: Tensor, rows: Sequence[Tensor], norm: nn.Module | None = None) -> Sum:
        """Rows (..., dim) times their weights (..., number of rows)."""
        sizes = weights.detach().float().abs().reshape(-1, weights.shape[-1]).mean(0)
        columns = weights.to(rows[0].dtype).unsqueeze(-1).unbind(-2)
        return cls([weight * row for weight, row in zip(columns, rows, strict=True)], sizes.tolist(), norm)

    @classmethod
    def of_first(cls, streams: Sequence[Tensor], norm: nn.Module | None, gain: float = 1.0) -> Sum:
        """The first stream alone."""
        first, *others = streams
        return cls([first, *map(torch.zeros_like, others)], [gain, *(0.0 for _ in others)], norm)


def mean_gain(norm: nn.Module | None) -> float:
    """Mean absolute gain of a norm, 1 for one without."""
    weight = getattr(norm, "weight", None)
    return float(weight.detach().float().abs().mean()) if isinstance(weight, Tensor) else 1.0
