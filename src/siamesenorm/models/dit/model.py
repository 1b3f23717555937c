"""The diffusion Transformer (DiT, arXiv 2212.09748) on any topology: patches, conditioned blocks, patches again.

adaLN-Zero goes through the topology as its parts stand there. The topology's norm before a sublayer (Pre-Norm's own,
N_in of siamese) has no affine and is modulated by timestep and class, as is its last norm; the gate multiplies the
update as it is written, once for all streams. A topology without a norm at one of these places (Post-Norm, SpanNorm)
has a normalised stream there, and that is modulated. With ``pre`` this is the original DiT.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

from siamesenorm.layers.adaln import Modulation, modulate
from siamesenorm.layers.condition_embedding import LabelEmbedding, TimestepEmbedding
from siamesenorm.layers.mlp import MLP
from siamesenorm.layers.vision_attention import VisionAttention
from siamesenorm.models.dit.config import DiTConfig
from siamesenorm.models.dit.init import DiTFirstWeights
from siamesenorm.models.stack import Block, Stack
from siamesenorm.residual import Gated, Place, Topology
from siamesenorm.residual.flow import Streams


class DiTBlock(Block):
    """Attention and FFN, each modulated and gated by the condition."""

    def __init__(self, attention: nn.Module, ffn: nn.Module, links: Iterable[nn.Module], topology: Topology) -> None:
        super().__init__(attention, ffn, links, topology)
        self.modulation = Modulation(topology.dim, 6)

    def pure(self, streams: Streams, context: Tensor) -> tuple[Streams, tuple[Any, ...]]:
        """The condition becomes shift, scale and gate of either sublayer."""
        return super().pure(streams, self.modulation(context))

    def attend(self, h: Tensor, context: tuple[Tensor, ...]) -> Gated:
        """Attention, by the first three parts."""
        shift, scale, gate = context[:3]
        return Gated(self.attention(modulate(h, shift, scale)), gate)

    def feed(self, h: Tensor, context: tuple[Tensor, ...]) -> Gated:
        """FFN, by the last three."""
        shift, scale, gate = context[3:]
        return Gated(self.ffn(modulate(h, shift, scale)), gate)


class DiT(Stack[DiTConfig]):
    """A class-conditional denoiser of images or latents.

    ::

        model = DiT(dit_preset("dit-digits", topology="pre"))
        model(x, t, y)                         # (batch, 2 · channels, 8, 8): noise and, if learnt, variance

    t runs from 0 to 1000; label ``classes`` stands for none of them.
    """

    block_class = DiTBlock
    first_weights = DiTFirstWeights
    positions: Tensor
    """(1, tokens, dim): fixed, but part of a checkpoint as in the official code."""

    def build(self, fused: bool) -> None:
        """Patches and conditions, blocks, a modulated head."""
        c = self.config
        # A convolution, not one product of cut patches: it rounds as the official code does.
        self.embedding = nn.Conv2d(c.channels, c.dim, c.patch_size, stride=c.patch_size)
        self.register_buffer("positions", torch.empty(1, c.tokens, c.dim))
        self.timestep = TimestepEmbedding(c.dim)
        self.label = LabelEmbedding(c.classes, c.dim, c.class_dropout)
        self.make_blocks(c.norms, fused)
        self.head_modulation = Modulation(c.dim, 2)
        self.head = nn.Linear(c.dim, c.patch_size**2 * c.out_channels)

    def make_attention(self, place: Place) -> VisionAttention:
        """Every patch sees every other."""
        c = self.config
        return VisionAttention(c.dim, c.heads, needs=self.residual.needs(place), norm=c.norms.inside, qk_norm=c.qk_norm)

    def make_ffn(self, place: Place) -> MLP:
        """An MLP."""
        c = self.config
        needs = self.residual.needs(place)
        return MLP(c.dim, c.ffn_dim, needs=needs, norm=c.norms.inside, activation="gelu_tanh", bias=True)

    def forward(self, x: Tensor, t: Tensor, y: Tensor) -> Tensor:
        """The prediction for noisy images at their timesteps.

        x: (batch, channels, size, size). t: (batch,), 0 to 1000, whole or fractional. y: (batch,) labels.
        """
        c = self.config
        if x.dim() != 4 or tuple(x.shape[1:]) != (c.channels, c.input_size, c.input_size):
            wanted = f"(batch, {c.channels}, {c.input_size}, {c.input_size})"
            raise ValueError(f"x: shape {tuple(x.shape)} is not allowed; it takes {wanted}")
        tokens = self.embedding(x).flatten(2).transpose(1, 2).contiguous()
        tokens = tokens + self.positions.to(tokens.dtype)
        condition = self.timestep(t) + self.label(y)
        return self.predict(self.through(tokens, condition)[0], condition)

    def predict(self, hidden: Tensor, condition: Tensor) -> Tensor:
        """The stack's output as an image of predictions."""
        c = self.config
        patches = self.head(self.for_head(modulate(hidden, *self.head_modulation(condition))))
        grid = patches.view(-1, c.side, c.side, c.patch_size, c.patch_size, c.out_channels)
        return grid.permute(0, 5, 1, 3, 2, 4).reshape(-1, c.out_channels, c.input_size, c.input_size)
