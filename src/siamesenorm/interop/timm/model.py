"""The vision Transformer with the arguments, attributes and methods that timm's models have."""

from __future__ import annotations

import contextlib
from functools import partial
from typing import Any

import torch
from timm.models._features import feature_take_indices
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from siamesenorm.models.stack import run_block
from siamesenorm.models.vit import VisionTransformer, ViTConfig
from siamesenorm.residual import Topology

POOLS = {"token": "token", "avg": "avg", "": "none"}
QK_NORMS = {False: "none", True: "head"}


class TimmVisionTransformer(VisionTransformer):
    """A `VisionTransformer` as timm builds and uses models; keywords are those of timm's own, plus `topology`.

    drop_rate: dropout before the classifier. proj_drop_rate: on the embedding and every sublayer's update.
    With a distillation token the model gives the mean of both heads, until `set_distilled_training` asks for the
    pair in training, as timm's does.
    """

    def __init__(
        self,
        img_size: int | tuple[int, int] = 224,
        patch_size: int = 16,
        in_chans: int = 3,
        num_classes: int = 1000,
        global_pool: str = "token",
        embed_dim: int = 768,
        depth: int = 12,
        num_heads: int = 12,
        mlp_ratio: float = 4.0,
        qkv_bias: bool = True,
        qk_norm: bool = False,
        proj_bias: bool = True,
        distilled: bool = False,
        topology: str = "siamese",
        dynamic_img_size: bool = False,
        drop_rate: float = 0.0,
        proj_drop_rate: float = 0.0,
        drop_path_rate: float = 0.0,
        fused: bool = True,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        config = ViTConfig(
            image_size=_side(img_size),
            patch_size=_side(patch_size),  # type: ignore[arg-type]  # two different sides are refused there
            channels=in_chans,
            classes=num_classes,
            dim=embed_dim,
            blocks=depth,
            heads=num_heads,
            ffn_dim=int(embed_dim * mlp_ratio),
            bias=proj_bias,
            qkv_bias=qkv_bias,
            qk_norm=QK_NORMS[qk_norm],  # type: ignore[arg-type]
            topology=topology,
            distilled=distilled,
            pool=_pool(global_pool),  # type: ignore[arg-type]
            drop_path=drop_path_rate,
            dropout=proj_drop_rate,
            dynamic_size=dynamic_img_size,
        )
        with torch.device(device) if device is not None else contextlib.nullcontext():
            super().__init__(config, fused=fused)
        if dtype is not None:
            self.to(dtype)
        self.head_drop = nn.Dropout(drop_rate)
        self.grad_checkpointing = self.distilled_training = False
        self.closes = True
        self.feature_info = [
            {"module": f"blocks.{block}", "num_chs": embed_dim, "reduction": patch_size} for block in range(depth)
        ]

    # What timm's code and users read ---------------------------------------------------------------------

    @property
    def num_classes(self) -> int:
        """Classes of the head, 0 where there is none."""
        return self.config.classes

    @property
    def num_features(self) -> int:
        """Width of features, of the stream and of what the head reads."""
        return self.config.dim

    head_hidden_size = embed_dim = num_features

    @property
    def in_chans(self) -> int:
        """Channels of an image."""
        return self.config.channels

    @property
    def num_prefix_tokens(self) -> int:
        """Tokens before the patches."""
        return self.config.prefix_tokens

    @property
    def global_pool(self) -> str:
        """What the head reads, in timm's words."""
        return next(theirs for theirs, ours in POOLS.items() if ours == self.config.pool)

    @property
    def gives_pair(self) -> bool:
        """Only after `set_distilled_training`."""
        return self.distilled_training and super().gives_pair

    def set_distilled_training(self, enable: bool = True) -> None:
        """Give both heads' logits in training, as losses with a teacher want them."""
        self.distilled_training = enable

    def no_weight_decay(self) -> set[str]:
        """Positions, tokens, and what the topology wants spared."""
        parts = [(prefix, part) for prefix, part in self.named_modules() if part is not self]
        spared = [(prefix, part.no_weight_decay()) for prefix, part in parts if hasattr(part, "no_weight_decay")]
        return super().no_weight_decay() | {f"{prefix}.{name}" for prefix, names in spared for name in names}

    def group_matcher(self, coarse: bool = False) -> dict[str, Any]:
        """Parameters by depth, for layer-wise learning rates."""
        blocks = [(rf"^blocks\.{block}\.", (block,)) for block in range(len(self.blocks))]
        return {
            "stem": r"^(?:cls_token|dist_token|pos_embed|patch_embed)",
            "blocks": [*blocks, (r"^residual\.", (99999,))],  # final norms go with the last block
        }

    def set_grad_checkpointing(self, enable: bool = True) -> None:
        """Keep the streams between blocks only and compute blocks again in backward."""
        self.grad_checkpointing = enable
        self.run = partial(checkpoint, use_reentrant=False) if enable else run_block

    # Heads -----------------------------------------------------------------------------------------------

    def get_classifier(self) -> nn.Module | tuple[nn.Module, nn.Module]:
        """The head, or both."""
        return self.head if self.head_dist is None else (self.head, self.head_dist)

    def reset_classifier(self, num_classes: int, global_pool: str | None = None) -> None:  # type: ignore[override]
        """Fresh head(s) for so many classes, 0 for none; with a distillation token, `global_pool` has no meaning."""
        pool = None if global_pool is None or self.config.distilled else _pool(global_pool)
        super().reset_classifier(num_classes, pool)

    def pool(self, features: Tensor) -> Tensor:
        """What the head reads, under its dropout."""
        pooled: Tensor = self.head_drop(super().pool(features))
        return pooled

    def set_input_size(self, img_size: int | tuple[int, int] | None = None, patch_size: Any = None) -> None:
        """Take images of another size from now on; positions are interpolated once."""
        if patch_size is not None and _side(patch_size) != self.config.patch_size:
            raise ValueError(f"patch_size = {patch_size} is not allowed; it stays {self.config.patch_size}")
        if img_size is not None:
            self.set_image_size(_side(img_size))

    # Features --------------------------------------------------------------------------------------------

    def forward_features(self, image: Tensor) -> Tensor:
        """(batch, tokens, dim): every token after the final norm(s)."""
        return self._end(self.between_blocks(image, ())[1])

    def _end(self, streams: Any) -> Tensor:
        return self.seen_at(streams, norm=self.closes)

    def forward_intermediates(
        self,
        x: Tensor,
        indices: int | list[int] | tuple[int, ...] | None = None,
        return_prefix_tokens: bool = False,
        norm: bool = False,
        stop_early: bool = False,
        output_fmt: str = "NCHW",
        intermediates_only: bool = False,
        output_dict: bool = False,
    ) -> Any:
        """Features behind blocks: the last so many, those of a list, or all; and the final ones before them.

        norm: close the stack behind each of them; else the sum of the topology's streams.
        output_fmt: NCHW or NLC; the other keywords are those of timm's own models.
        """
        if output_fmt not in ("NCHW", "NLC"):
            raise ValueError(f"output_fmt = {output_fmt!r} is not allowed; it takes NCHW or NLC")
        wanted, last = feature_take_indices(len(self.blocks), indices)
        found, streams = self.between_blocks(x, wanted, norm, until=last + 1 if stop_early else None)
        parts = [self.split_tokens(tokens, x, output_fmt == "NCHW") for tokens in found]
        features: list[Any] = [patches for patches, _ in parts]
        if output_dict:
            result: dict[str, Any] = {"image_intermediates": features}
            if return_prefix_tokens:
                result["image_intermediates_prefix"] = [prefix for _, prefix in parts]
            return result if intermediates_only else {**result, "image_features": self._end(streams)}
        features = parts if return_prefix_tokens else features
        return features if intermediates_only else (self._end(streams), features)

    def get_intermediate_layers(  # type: ignore[override]
        self,
        x: Tensor,
        n: int | list[int] | tuple[int, ...] = 1,
        reshape: bool = False,
        return_prefix_tokens: bool = False,
        norm: bool = False,
    ) -> Any:
        """`forward_intermediates` under the name and with the keywords of DINO."""
        fmt = "NCHW" if reshape else "NLC"
        return self.forward_intermediates(x, n, return_prefix_tokens, norm, output_fmt=fmt, intermediates_only=True)

    def prune_intermediate_layers(
        self, indices: int | list[int] | tuple[int, ...] = 1, prune_norm: bool = False, prune_head: bool = True
    ) -> list[int]:
        """Drop what the features of `indices` do not need; the indices kept."""
        wanted, last = feature_take_indices(len(self.blocks), indices)
        kept = last + 1
        self.blocks = self.blocks[:kept]
        self.residual.links = self.residual.links[: 2 * kept]
        self.residual.places = self.residual.places[: 2 * kept]
        if prune_norm:
            self.closes = False
            for module in self.residual.modules():
                if isinstance(module, Topology):
                    module.final_norm = None
        if prune_head:
            self.reset_classifier(0, "")
        return list(wanted)


def _side(size: Any) -> int | tuple[int, int]:
    """One number where both sides are equal."""
    if isinstance(size, int):
        return size
    height, width = size
    return height if height == width else (height, width)


def _pool(name: str) -> str:
    if name not in POOLS:
        raise ValueError(f"global_pool = {name!r} is not allowed; it takes {', '.join(map(repr, POOLS))}")
    return POOLS[name]
