"""The vision Transformer (DeiT): patches, class and distillation token, a stack on any topology, head(s)."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from siamesenorm.layers.mlp import MLP
from siamesenorm.layers.patch import PatchEmbedding, resample_positions
from siamesenorm.layers.vision_attention import VisionAttention
from siamesenorm.models.stack import Block, Stack
from siamesenorm.models.vit.config import ViTConfig
from siamesenorm.models.vit.init import ViTFirstWeights
from siamesenorm.residual import Place
from siamesenorm.residual.flow import Streams

Logits = Tensor | tuple[Tensor, Tensor]


class ImageBlock(Block):
    """A block whose sublayers share nothing."""

    def attend(self, h: Tensor, context: None) -> Tensor:
        """Among the tokens of an image."""
        return self.attention(h)


class VisionTransformer(Stack[ViTConfig]):
    """An image classifier on any residual topology.

    ::

        model = VisionTransformer(ViTConfig(image_size=32, patch_size=4, classes=10, dim=64, blocks=4, heads=4,
                                            ffn_dim=256))
        model(images)                          # (batch, 10)
        model.forward_features(images)         # (batch, tokens, 64), after the stack's final norm

    With a distillation token, training gives the pair of both heads' logits and evaluation their mean.
    """

    block_class = ImageBlock
    first_weights = ViTFirstWeights

    def build(self, fused: bool) -> None:
        """Patches, tokens and positions, blocks, and a head for each token that has one."""
        c = self.config
        self.patch_embed = PatchEmbedding(c.patch_size, c.channels, c.dim)
        self.cls_token = nn.Parameter(torch.empty(1, 1, c.dim))
        self.dist_token = nn.Parameter(torch.empty(1, 1, c.dim)) if c.distilled else None
        self.pos_embed = nn.Parameter(torch.empty(1, c.tokens, c.dim))
        self.make_blocks(c.norm_spec, fused, c.drop_path_rates)
        self.head = self._classifier()
        self.head_dist = self._classifier() if c.distilled else None

    def make_attention(self, place: Place) -> VisionAttention:
        """Every token sees every other."""
        c = self.config
        return VisionAttention(
            c.dim,
            c.heads,
            needs=self.residual.needs(place),
            norm=c.norm_spec.ungated,
            qk_norm=c.qk_norm,
            bias=c.bias,
            qkv_bias=c.qkv_bias,
        )

    def make_ffn(self, place: Place) -> MLP:
        """An MLP."""
        c, needs = self.config, self.residual.needs(place)
        return MLP(c.dim, c.ffn_dim, needs=needs, norm=c.norm_spec.ungated, activation=c.activation, bias=c.bias)

    def _classifier(self) -> nn.Module:
        return nn.Linear(self.config.dim, self.config.classes) if self.config.classes else nn.Identity()

    def heads(self) -> Iterator[nn.Linear]:
        """The classifiers there are."""
        yield from (head for head in (self.head, self.head_dist) if isinstance(head, nn.Linear))

    def no_weight_decay(self) -> set[str]:
        """Parameters that DeiT's optimiser does not decay."""
        return {"pos_embed", "cls_token", "dist_token"}

    def forward(self, image: Tensor) -> Logits:
        """Logits (batch, classes) of images (batch, channels, height, width), or features where classes = 0."""
        return self.forward_head(self.forward_features(image))

    def forward_features(self, image: Tensor) -> Tensor:
        """(batch, tokens, dim): every token after the stack's final norm, class (and distillation) token first."""
        return self.through(self.embed(image))[0]

    def embed(self, image: Tensor) -> Tensor:
        """(batch, tokens, dim): patches behind the class (and distillation) token, with positions."""
        if image.dim() != 4 or image.shape[1] != self.config.channels:
            wanted = f"(batch, {self.config.channels}, height, width)"
            raise ValueError(f"image: shape {tuple(image.shape)} is not allowed; it takes {wanted}")
        positions = self.positions((image.shape[-2], image.shape[-1]))
        patches = self.patch_embed(image)
        prefix = [token for token in (self.cls_token, self.dist_token) if token is not None]
        x = torch.cat([*(token.expand(patches.shape[0], -1, -1) for token in prefix), patches], dim=1) + positions
        return F.dropout(x, self.config.dropout, self.training) if self.config.dropout else x

    def positions(self, shape: tuple[int, int]) -> Tensor:
        """Positions for images of height and width `shape`."""
        c = self.config
        if shape == c.image_shape:
            return self.pos_embed
        size, (height, width) = c.patch_size, shape
        if not c.dynamic_size:
            expected = "×".join(map(str, c.image_shape))
            raise ValueError(f"image: {height}×{width} pixels; this model takes {expected}, or give dynamic_size=True")
        if height % size or width % size:
            raise ValueError(f"image: {height}×{width} pixels; sides must be multiples of patch_size = {size}")
        return resample_positions(self.pos_embed, c.grid, (height // size, width // size), c.prefix_tokens)

    def forward_head(self, features: Tensor, pre_logits: bool = False) -> Logits:
        """Logits from what `forward_features` gives; with `pre_logits`, what the head would read."""
        if self.dist_token is not None and self.head_dist is not None:
            token, teacher = features[:, 0], features[:, 1]
            if pre_logits:
                return (token + teacher) / 2
            logits, taught = self.head(self.for_head(token)), self.head_dist(self.for_head(teacher))
            return (logits, taught) if self.gives_pair else (logits + taught) / 2
        pooled = self.pool(features)
        return pooled if pre_logits else self.head(self.for_head(pooled))

    @property
    def gives_pair(self) -> bool:
        """Whether a model with a distillation token gives both heads' logits now, not their mean."""
        return self.training and self.config.classes > 0

    def pool(self, features: Tensor) -> Tensor:
        """What the head reads of all tokens."""
        if self.config.pool == "avg":
            return features[:, self.config.prefix_tokens :].mean(1)
        return features[:, 0] if self.config.pool == "token" else features

    def reset_classifier(self, classes: int, pool: str | None = None, *, seed: int | None = None) -> None:
        """Fresh head(s) for so many classes, 0 for none; `pool` as in the configuration, default: as it was."""
        device, dtype = self.pos_embed.device, self.pos_embed.dtype
        changes = {"classes": classes, **({} if pool is None else {"pool": pool})}
        self.config = ViTConfig.model_validate({**self.config.model_dump(), **changes})
        self.head = self._classifier().to(device, dtype).train(self.training)
        if self.config.distilled:
            self.head_dist = self._classifier().to(device, dtype).train(self.training)
        ViTFirstWeights(self, seed).head()

    @torch.no_grad()
    def set_image_size(self, size: int | tuple[int, int]) -> None:
        """Take images of another size from now on; positions are interpolated once."""
        config = ViTConfig.model_validate({**self.config.model_dump(), "image_size": size})
        positions = resample_positions(self.pos_embed, self.config.grid, config.grid, config.prefix_tokens)
        self.pos_embed = nn.Parameter(positions.clone(), requires_grad=self.pos_embed.requires_grad)
        self.config = config

    def get_intermediate_layers(
        self,
        image: Tensor,
        n: int | Sequence[int] = 1,
        *,
        reshape: bool = False,
        prefix_tokens: bool = False,
        norm: bool = False,
    ) -> list[Tensor] | list[tuple[Tensor, Tensor]]:
        """What stands between blocks: behind the last `n`, or behind those of the indices `n`, in order of depth.

        Each is (batch, patches, dim), or (batch, dim, rows, columns) with `reshape`; with `prefix_tokens` each is a
        pair with the class (and distillation) token. `norm` closes the stack there with its final norm(s); else
        it is the sum of the topology's streams, which is the stream itself where there is one.
        """
        c = self.config
        numbers = list(range(-n, 0)) if isinstance(n, int) else list(n)
        if wrong := [number for number in numbers if not -c.blocks <= number < c.blocks]:
            raise ValueError(f"n: block {wrong[0]} is not allowed; this model takes {-c.blocks} to {c.blocks - 1}")
        wanted = [number % c.blocks for number in numbers]
        found, _ = self.between_blocks(image, wanted, norm)
        parts = [self.split_tokens(tokens, image, reshape) for tokens in found]
        return parts if prefix_tokens else [patches for patches, _ in parts]

    def split_tokens(self, tokens: Tensor, image: Tensor, reshape: bool) -> tuple[Tensor, Tensor]:
        """The patches of an image, with `reshape` in rows and columns, and the tokens before them."""
        c = self.config
        prefix, patches = tokens[:, : c.prefix_tokens], tokens[:, c.prefix_tokens :]
        if reshape:
            grid = (image.shape[-2] // c.patch_size, image.shape[-1] // c.patch_size)
            patches = patches.transpose(1, 2).unflatten(2, grid).contiguous()
        return patches, prefix

    def between_blocks(
        self, image: Tensor, wanted: Sequence[int], norm: bool = False, *, until: int | None = None
    ) -> tuple[list[Tensor], Streams]:
        """All tokens behind the blocks `wanted`, in order of depth; the streams behind block `until` - 1 (or all)."""
        streams, found = self.residual.open(self.embed(image)), []
        for index, block in enumerate(list(self.blocks)[:until]):
            streams, _ = self.run(block, streams, None)  # type: ignore[arg-type]
            if index in wanted:
                found.append(self.seen_at(streams, norm))
        return found, streams

    def seen_at(self, streams: Streams, norm: bool) -> Tensor:
        """The stack's output if it ended here, or without its end the sum of its streams."""
        if norm:
            return self.residual.close(streams)
        first, *others = self.residual.named_streams(streams).values()
        return sum(others, start=first)
