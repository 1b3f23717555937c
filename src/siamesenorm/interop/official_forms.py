"""Which of our models have an official form: a state dict that loads again as the same function.

The official code knows a few topologies, and its configurations cannot say all that ours can. What it has no word for
is refused by name: its tensors would fit under the official names, and load as another model.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel

from siamesenorm.catalogue import spec_of
from siamesenorm.errors import OfficialError
from siamesenorm.models.lm import LMConfig
from siamesenorm.residual import Residual, Topology
from siamesenorm.residual.siamese import Siamese

LANGUAGE = ("siamese", "siamese:form=hybrid_pre", "pre", "post", "hybrid", "hybrid_star")
VISION = DIFFUSION = ("siamese", "pre")
# Fields that an official vision or diffusion model has in one way only.
VISION_FIELDS = {
    "activation": "gelu",
    "norm": "layer",
    "norm_eps": 1e-6,
    "bias": True,
    "qk_norm": "none",
    "pool": "token",
    "parametrization": "standard",
}
# Fields of language models for which OLMo's configuration has no word.
UNSAID = (
    "moe",
    "window",
    "qkv_bias",
    "query_factor",
    "embedding_scale",
    "rope_scaling",
    "rotary_dim",
    "learned_positions",
    "parametrization",
)
DIFFUSION_FIELDS = {"norm": "layer", "norm_eps": 1e-6, "qk_norm": "none", "parametrization": "standard"}


def official_topology(residual: Topology, known: tuple[str, ...], model: str) -> str:
    """The official topology that this one is, however it was spelt; `model` is named where there is none."""
    for text in known:
        if same_equation(residual, Residual(text, dim=1, blocks=1)):
            return text
    raise OfficialError(f"topology: {spec_of(residual)} has no official {model}; these have: {', '.join(known)}")


def same_equation(one: Topology, other: Topology) -> bool:
    """Whether two topologies do the same with the same parameters."""
    if type(one) is not type(other):
        return False
    if isinstance(one, Siamese) and isinstance(other, Siamese):
        settings = [(pair.input_norm, pair.depth_scaling, pair.has_final_norm) for pair in (one, other)]
        return settings[0] == settings[1] and same_equation(one.x, other.x) and same_equation(one.y, other.y)
    return one.options == other.options


def check_language_fields(config: LMConfig, topology: str) -> None:
    """Raise where a language model has what OLMo's configuration cannot say."""
    expected: dict[str, Any] = {name: LMConfig.model_fields[name].default for name in UNSAID}
    if config.activation not in ("swiglu", "gelu"):
        expected["activation"] = "swiglu"
    if config.dim_per_head * config.heads != config.dim:
        expected["head_dim"] = None
    if topology.startswith("siamese"):
        expected["norm_affine"] = True  # the second stream is known by its gains
    check_fields(config, expected, "language model")


def check_fields(config: BaseModel, expected: Mapping[str, Any], model: str) -> None:
    """Raise at the first field that is not what every official model has."""
    for name, value in expected.items():
        if (given := getattr(config, name)) != value:
            raise OfficialError(f"{name} = {given!r} has no official {model}; it takes {value!r}")
