"""First weights of a vision Transformer, as DeiT's (arXiv 2012.12877).

Projections, heads, tokens and positions are normal with std .02 (`init_std`; the official cut at ±2 is a hundred of
them away), biases 0; the patch embedding is uniform within ±1/sqrt(fan_in), weight and bias, as a convolution's.
The topology's `InitRule` comes on top; there is no depth factor to keep or replace.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from siamesenorm.models.init import FirstWeights
from siamesenorm.models.vit.config import ViTConfig
from siamesenorm.residual import Place

if TYPE_CHECKING:
    from siamesenorm.models.vit.model import VisionTransformer


class ViTFirstWeights(FirstWeights):
    """First weights of a vision Transformer."""

    model: VisionTransformer
    config: ViTConfig

    def embedding(self) -> None:
        """Patches, tokens and positions."""
        model = self.model
        with self.part(model.patch_embed):
            patch = model.patch_embed.proj
            limit = patch.weight[0].numel() ** -0.5
            for parameter in patch.parameters():
                parameter.uniform_(-limit, limit, generator=self.generator)
        with self.part_context(model):
            for token in (model.cls_token, model.dist_token, model.pos_embed):
                if token is not None:
                    self.draw(token, self.rule.std or self.config.init_std)

    def projection(self, weight: Tensor, place: Place, role: Any) -> None:
        """All alike."""
        self.draw(weight, self.std(self.config.init_std * self.wide**-0.5, role))

    @torch.no_grad()
    def head(self) -> None:
        """The classifiers there are."""
        for head in self.model.heads():
            with self.part(head):
                self.draw(head.weight, self.config.init_std)
