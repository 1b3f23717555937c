"""Named shapes of language models: the paper's, and small ones for CPUs.

The shapes of the 1.3B and the four 390M models come out at their stated size with one rule for all five: FFN hidden
width 4·d, heads of width 128, OLMo's vocabulary of 50304 and an untied head. ``docs/models.md`` has the arithmetic,
also that of the 15B mixture, whose shape the paper does not give.
"""

from __future__ import annotations

from typing import Any

from siamesenorm.models.lm.config import LMConfig, MoEConfig
from siamesenorm.models.stack_config import Preset, changed

OLMO_VOCABULARY = 50304


def _small(
    vocab_size: int, blocks: int, dim: int, heads: int, ffn_dim: int, moe: MoEConfig | None = None, length: int = 1024
) -> LMConfig:
    shape: dict[str, Any] = {"vocab_size": vocab_size, "dim": dim, "blocks": blocks, "heads": heads, "ffn_dim": ffn_dim}
    return LMConfig(**shape, qk_norm="head", max_length=length, moe=moe)


def _olmo(blocks: int, dim: int, *, ffn_dim: int | None = None, moe: MoEConfig | None = None) -> LMConfig:
    return _small(OLMO_VOCABULARY, blocks, dim, dim // 128, ffn_dim or 4 * dim, moe, length=2048)


PRESETS: dict[str, Preset[LMConfig]] = {
    preset.name: preset
    for preset in (
        Preset("lm-nano", "bytes, for a laptop in minutes", _small(256, 12, 64, 4, 192)),
        Preset("lm-micro", "small vocabulary, for a CPU in an hour", _small(8192, 8, 256, 4, 704)),
        Preset("lm-mini", "for a CPU overnight or a small GPU", _small(16384, 12, 512, 8, 1408)),
        Preset(
            "moe-micro",
            "lm-micro's active size, 16 experts",
            _small(8192, 8, 256, 4, 704, MoEConfig(experts=16, top_k=2, expert_dim=352)),
        ),
        Preset("lm-390m-10x1280", "depth sweep, 10 blocks", _olmo(10, 1280)),
        Preset("lm-390m-17x1024", "depth sweep, 17 blocks", _olmo(17, 1024)),
        Preset("lm-390m-33x768", "depth sweep, 33 blocks", _olmo(33, 768)),
        Preset("lm-390m-80x512", "depth sweep, 80 blocks", _olmo(80, 512)),
        Preset("lm-1.3b", "the paper's main model", _olmo(16, 2048)),
        Preset(
            "moe-15b-a2b",
            "the paper's mixture of experts; shape our choice",
            _olmo(24, 2048, ffn_dim=1216, moe=MoEConfig(experts=80, top_k=8, expert_dim=1216)),
        ),
    )
}


def preset(name: str, **changes: Any) -> LMConfig:
    """The configuration of a preset, with fields changed if you like: ``preset("lm-nano", topology="pre")``."""
    return changed(PRESETS, name, changes)
