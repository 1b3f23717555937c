"""Named shapes of vision Transformers: DeiT's, and small ones for small images."""

from __future__ import annotations

from typing import Any

from siamesenorm.models.stack_config import Preset, changed
from siamesenorm.models.vit.config import ViTConfig

DEIT_WIDTHS = {"tiny": 192, "small": 384, "base": 768}


def deit(size: str, **changes: Any) -> ViTConfig:
    """DeiT (arXiv 2012.12877) tiny, small or base: 12 blocks, heads of width 64, 224 pixels in patches of 16."""
    dim = DEIT_WIDTHS[size]
    fields = {"image_size": 224, "patch_size": 16, "classes": 1000, "blocks": 12, "drop_path": 0.1}
    return ViTConfig.model_validate({**fields, "dim": dim, "heads": dim // 64, "ffn_dim": 4 * dim, **changes})


def _small(image_size: int, patch_size: int, channels: int, classes: int, blocks: int, dim: int) -> ViTConfig:
    return ViTConfig(
        image_size=image_size,
        patch_size=patch_size,
        channels=channels,
        classes=classes,
        dim=dim,
        blocks=blocks,
        heads=dim // 32,
        ffn_dim=4 * dim,
    )


VIT_PRESETS: dict[str, Preset[ViTConfig]] = {
    preset.name: preset
    for preset in (
        Preset("vit-8", "8 pixels, grey: scikit-learn's digits", _small(8, 2, 1, 10, 6, 64)),
        Preset("vit-28", "28 pixels, grey: MNIST, Fashion-MNIST", _small(28, 4, 1, 10, 6, 96)),
        Preset("vit-32", "32 pixels: CIFAR-10", _small(32, 4, 3, 10, 9, 192)),
        Preset("vit-64", "64 pixels: Tiny ImageNet", _small(64, 8, 3, 200, 9, 192)),
        *(Preset(f"deit-{size}", f"DeiT {size}, ImageNet", deit(size)) for size in DEIT_WIDTHS),
        *(
            Preset(f"deit-{size}-distilled", f"DeiT {size} with a distillation token", deit(size, distilled=True))
            for size in DEIT_WIDTHS
        ),
    )
}


def vit_preset(name: str, **changes: Any) -> ViTConfig:
    """The configuration of a preset, with fields changed if you like: ``vit_preset("deit-tiny", topology="pre")``."""
    return changed(VIT_PRESETS, name, changes)
