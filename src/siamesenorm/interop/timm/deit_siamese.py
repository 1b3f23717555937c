"""Entry points in timm's registry: every size of DeiT, with and without distillation token, on SiameseNorm.

``deit_tiny_patch16_224_siamese``, ``deit_base_distilled_patch16_224_siamese_plain``; any other topology is an argument:
``timm.create_model("deit_tiny_patch16_224_siamese", topology="hyper")``. timm's own names carry no suffix, so none of
them is touched. There are no published weights: ``pretrained=True`` says so.
"""

from __future__ import annotations

import sys
from functools import partial
from typing import Any

from timm.data import IMAGENET_DEFAULT_MEAN, IMAGENET_DEFAULT_STD
from timm.models import build_model_with_cfg, generate_default_cfgs, register_model
from torch import nn

from siamesenorm.interop.timm.model import TimmVisionTransformer
from siamesenorm.interop.timm.weights import checkpoint_filter_fn
from siamesenorm.models.vit.presets import DEIT_WIDTHS

FORMS = {
    "siamese": "siamese",
    "siamese_hybrid_pre": "siamese:form=hybrid_pre",
    "siamese_plain": "siamese:form=plain",
}
"""What a model's name ends with, and the topology it stands for."""


def model_names() -> list[str]:
    """All names registered here."""
    return sorted(default_cfgs)


def _name(size: str, distilled: bool, suffix: str) -> str:
    return f"deit_{size}_{'distilled_' if distilled else ''}patch16_224_{suffix}"


def _cfg(distilled: bool) -> dict[str, Any]:
    return {
        "url": "",
        "num_classes": 1000,
        "input_size": (3, 224, 224),
        "pool_size": None,
        "crop_pct": 0.9,
        "interpolation": "bicubic",
        "fixed_input_size": True,
        "mean": IMAGENET_DEFAULT_MEAN,
        "std": IMAGENET_DEFAULT_STD,
        "first_conv": "patch_embed.proj",
        "classifier": ("head", "head_dist") if distilled else "head",
    }


VARIANTS = {
    _name(size, distilled, suffix): (size, distilled, topology)
    for suffix, topology in FORMS.items()
    for size in DEIT_WIDTHS
    for distilled in (False, True)
}
default_cfgs = generate_default_cfgs({name: _cfg(distilled) for name, (_, distilled, _) in VARIANTS.items()})


def create(name: str, pretrained: bool = False, **kwargs: Any) -> nn.Module:
    """The model of one name; keywords go before what the name says: ``topology="siamese:depth_scaling=none"``."""
    size, distilled, topology = VARIANTS[name]
    dim = DEIT_WIDTHS[size]
    shape = {"patch_size": 16, "embed_dim": dim, "depth": 12, "num_heads": dim // 64}
    out_indices = kwargs.pop("out_indices", 3)
    model: nn.Module = build_model_with_cfg(
        TimmVisionTransformer,
        name,
        pretrained,
        pretrained_filter_fn=checkpoint_filter_fn,
        feature_cfg={"out_indices": out_indices, "feature_cls": "getter"},
        **{**shape, "distilled": distilled, "topology": topology, **kwargs},
    )
    return model


def _register(name: str) -> None:
    entry: Any = partial(create, name)
    entry.__name__, entry.__module__ = name, __name__
    entry.__doc__ = f"{name.replace('_', ' ')}: topology {VARIANTS[name][2]}."
    setattr(sys.modules[__name__], name, register_model(entry))


for _variant in VARIANTS:
    _register(_variant)
