"""Named shapes of diffusion Transformers: those of arXiv 2212.09748 for latents of 256² images, and small ones."""

from __future__ import annotations

from typing import Any

from siamesenorm.models.dit.config import DiTConfig
from siamesenorm.models.stack_config import Preset, changed

SIZES = {"s": (12, 384, 6), "b": (12, 768, 12), "l": (24, 1024, 16), "xl": (28, 1152, 16)}
"""Blocks, width and heads."""
PATCHES = (2, 4, 8)


def _preset(name: str, about: str, shape: tuple[int, int, int], **image: Any) -> Preset[DiTConfig]:
    blocks, dim, heads = shape
    return Preset(name, about, DiTConfig(dim=dim, blocks=blocks, heads=heads, ffn_dim=4 * dim, **image))


def _official(size: str, patch: int) -> Preset[DiTConfig]:
    about = f"DiT-{size.upper()}/{patch}, 32² latents of 256² images"
    image = {"input_size": 32, "patch_size": patch, "channels": 4, "classes": 1000}
    return _preset(f"dit-{size}-{patch}", about, SIZES[size], **image)


def _small(name: str, about: str, input_size: int, patch_size: int, shape: tuple[int, int, int]) -> Preset[DiTConfig]:
    return _preset(name, about, shape, input_size=input_size, patch_size=patch_size, channels=1, classes=10)


DIT_PRESETS: dict[str, Preset[DiTConfig]] = {
    preset.name: preset
    for preset in (
        _small("dit-digits", "digits of 8 × 8 pixels, for a CPU in minutes", 8, 2, (6, 64, 4)),
        _small("dit-fashion", "clothes of 28 × 28 pixels", 28, 4, (6, 96, 4)),
        *(_official(size, patch) for size in SIZES for patch in PATCHES),
    )
}


def dit_preset(name: str, **changes: Any) -> DiTConfig:
    """The configuration of a preset, with fields changed if you like: ``dit_preset("dit-b-2", topology="pre")``."""
    return changed(DIT_PRESETS, name, changes)
