"""Language models on their way from Pre-Norm to a topology that cannot compute it: blended, and settled at the end."""

from __future__ import annotations

import re
from typing import Any

import torch

from siamesenorm.errors import NotExact
from siamesenorm.models.lm.config import LMConfig
from siamesenorm.models.lm.model import LanguageModel
from siamesenorm.residual import Residual, TopologyError
from siamesenorm.residual.blend import SEPARATOR, Blend
from siamesenorm.residual.grafts import compute_pre_norm, copy_norm
from siamesenorm.residual.pre import PreLink

Carried = dict[str, str]
"""Parameters that go on as one of another model: their names, each with the name there."""


@torch.no_grad()
def blend(
    model: LanguageModel, topology: str, *, steps: int, start: int = 0, qk_norm: str | None = None
) -> tuple[LanguageModel, Carried]:
    """A Pre-Norm model that becomes another topology over training, at first the same function.

    steps: over so many, behind the first `start`. qk_norm: a norm on queries and keys that grows in as well.
    The other topology has the source's norms where its sublayers read through one, and else its first values.
    """
    if model.config.topology != "pre":
        raise TopologyError(
            f"graft: the source's topology {model.config.topology!r} is not allowed; it takes a model of pre"
        )
    had = model.config.qk_norm
    if qk_norm not in (None, had) and had != "none":
        raise TopologyError.refused("graft: qk_norm =", qk_norm, f"the source has {had!r}")
    name = f"blend:to={topology.replace(',', SEPARATOR)},steps={steps},start={start},qk_norm={had}"
    for wanted in (topology, name):  # either says what is wrong with it
        Residual(wanted, model.config.dim, model.config.blocks, device="meta")
    changed = {"topology": name, "qk_norm": qk_norm or had}
    blended = LanguageModel(LMConfig.model_validate({**model.config.model_dump(), **changed}), seed=0)
    blended = blended.to(model.embedding.weight)
    residual, source = blended.residual, model.residual
    assert isinstance(residual, Blend)
    norms: list[Any] = [link.norm for link in source.links]
    assert source.final_norm is not None
    try:
        compute_pre_norm(residual.target, norms, source.final_norm)
    except NotExact:
        for link, norm in zip(residual.target.links, norms, strict=True):
            if isinstance(link, PreLink):
                copy_norm(link.norm, norm)
        if residual.target.final_norm is not None:
            copy_norm(residual.target.final_norm, source.final_norm)
    own, carried = dict(blended.named_parameters()), {}
    for name, parameter in model.named_parameters():
        there = re.sub(r"^(residual\.|blocks\.\d+\.links\.\d\.)", r"\1source.", name)
        own[there].copy_(parameter)
        carried[there] = name
    residual.set_step(start + 1)
    return blended.train(model.training), carried


@torch.no_grad()
def settle(model: LanguageModel) -> tuple[LanguageModel, Carried]:
    """The other topology of a blend alone: what the blend computes when b is 1."""
    residual = model.residual
    assert isinstance(residual, Blend)
    topology = residual.options.to.replace(SEPARATOR, ",")
    settled = LanguageModel(LMConfig.model_validate({**model.config.model_dump(), "topology": topology}), seed=0)
    settled = settled.to(model.embedding.weight)
    own, there, carried = dict(settled.named_parameters()), dict(model.named_parameters()), {}
    for name, parameter in own.items():
        then = re.sub(r"^(residual\.|blocks\.\d+\.links\.\d\.)", r"\1target.", name)
        then = then if then in there else re.sub(r"\b([qkv]|out)_norm\.", r"\1_norm.norm.", then)
        parameter.copy_(there[then])
        carried[name] = then
    return settled.train(model.training), carried
