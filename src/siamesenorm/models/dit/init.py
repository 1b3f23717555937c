"""First weights of a diffusion Transformer.

| weights                                      | start                                        |
|----------------------------------------------|----------------------------------------------|
| projections of attention and FFN, patches    | uniform, std sqrt(2 / (fan_in + fan_out))    |
| embeddings of timestep and label             | normal, std .02                              |
| modulations, head                            | 0                                            |
| biases                                       | 0                                            |
| positions (not learnt)                       | sines and cosines of row and column          |

Queries, keys and values count as the one matrix that they lie in, as in the official code. The topology's `InitRule`
comes on top. Gates that start closed take the place of a depth factor. The head starts at 0, and with it the model's
output.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from siamesenorm.layers.patch import grid_positions
from siamesenorm.models.dit.config import DiTConfig
from siamesenorm.models.init import FirstWeights
from siamesenorm.residual import Place

if TYPE_CHECKING:
    from siamesenorm.models.dit.model import DiT

EMBEDDING_STD = 0.02


class DiTFirstWeights(FirstWeights):
    """First weights of a diffusion Transformer."""

    model: DiT
    config: DiTConfig

    def embedding(self) -> None:
        """Positions, patches, labels, timesteps."""
        model = self.model
        with self.part_context(model):
            model.positions.copy_(grid_positions(self.config.side, self.config.dim, model.positions.device))
        with self.part(model.embedding):
            patch = model.embedding.weight.flatten(1)
            self.draw_by_fans(patch, self.base_width)
        with self.part(model.label):
            self.draw(model.label.table.weight, EMBEDDING_STD)
        with self.part(model.timestep):
            self.draw(model.timestep.up.weight, EMBEDDING_STD)
            self.draw(model.timestep.down.weight, EMBEDDING_STD * self.wide**-0.5)

    def projection(self, weight: Tensor, place: Place, role: Any) -> None:
        """By the fans of the matrix that it lies in, unless the rule fixes the std."""
        if self.rule.std is not None:
            self.draw(weight, self.std(self.rule.std, role))
            return
        together = 3 if role in ("query", "key", "value") else 1
        self.draw_by_fans(weight, together * weight.shape[0])
        weight.mul_(self.rule.scale.get(role, 1.0))

    def draw_by_fans(self, weight: Tensor, fan_out: int) -> None:
        """Fill a matrix from a uniform distribution; one without memory stays as it is."""
        bound = (6 / (weight.shape[1] + fan_out)) ** 0.5
        if not weight.is_meta:
            weight.uniform_(-bound, bound, generator=self.generator)

    def head(self) -> None:
        """Zero, as all modulations are."""
        with self.part(self.model.head_modulation):
            pass  # nothing in it is drawn
        with self.part(self.model.head):
            nn.init.zeros_(self.model.head.weight)
