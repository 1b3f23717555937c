"""From Pre-Norm to another topology with the same function: settings of the new parameters that change nothing.

A norm follows every read, and norms ignore scale: so many topologies can compute Pre-Norm exactly, up to the eps of
norms. The settings are uneven where rows are equal, so that gradients tell them apart and training goes on from there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from siamesenorm.errors import NotExact, TopologyError
from siamesenorm.residual.attention_residual import AttentionResidual
from siamesenorm.residual.base import Topology
from siamesenorm.residual.earlier import Dense, EmbeddingBack
from siamesenorm.residual.gated_residual import GatedLink, GatedResidual, GatedRows
from siamesenorm.residual.hyper import Hyper
from siamesenorm.residual.independent import Independent, IndependentLink, Widen
from siamesenorm.residual.manifold import Manifold, ManifoldLite
from siamesenorm.residual.norms import GatedNorm, Norm, RMSNorm
from siamesenorm.residual.post import PostStartLink
from siamesenorm.residual.pre import LayerScale, Pre, RawLink, Scaled
from siamesenorm.residual.registry import TOPOLOGIES, parse_topology
from siamesenorm.residual.siamese import PairLink, Siamese
from siamesenorm.residual.weighed import Zaya

Copied = list[tuple[nn.Module, nn.Module]]
"""Norms that became those of Pre-Norm as they are: each with its source."""
GraftSetting = Callable[[Any, Sequence[nn.Module], nn.Module], Copied]
EXACT: dict[type[Topology], GraftSetting] = {}
"""How each topology is set; see `compute_pre_norm`."""


def compute_pre_norm(
    topology: Topology, norms: Sequence[nn.Module], final: nn.Module
) -> dict[nn.Parameter, nn.Parameter]:
    """Set every parameter of a topology so that it computes Pre-Norm with these norms, one per sublayer and the last.

    Raises `NotExact` where no such setting is known. Steps of `prores` are set to their end. The embedding has to be
    multiplied by `embedding_factor`. Returns the parameters that are now one of the norms', each with that one.
    """
    setting = EXACT.get(type(topology))
    if setting is None:
        raise NotExact(
            f"{topology.name}: no setting is known that computes Pre-Norm; it is for {', '.join(exact_names())}"
        )
    if len(norms) != len(topology.links):
        raise TopologyError(f"{topology.name}: {len(norms)} norms are given for {len(topology.links)} sublayers")
    with torch.no_grad():
        for link in topology.links:
            for module in link.modules():
                reset: Callable[[], None] = getattr(module, "reset_parameters", lambda: None)
                reset()
        topology.reset_parameters()
        copied = setting(topology, norms, final)
    topology.set_step(10**9)
    return {to.get_parameter(name): parameter for to, norm in copied for name, parameter in norm.named_parameters()}


def graft_text(topology: str) -> str:
    """A topology as grafts to it are made: with the options that let it compute Pre-Norm, where they are not given.

    A mean of N sources would let eps count N^2 times.
    """
    name, options = parse_topology(topology)
    if TOPOLOGIES.get(name) is not AttentionResidual or "sum" in options:
        return topology
    return f"{topology}{',' if options else ':'}sum=true"


def embedding_factor(topology: Topology) -> float:
    """What the embedding of a Pre-Norm model has to be multiplied by, so that a topology computes the same."""
    return 1 / topology.options.rate if isinstance(topology, Widen) else 1.0


def eps_for(topology: Topology, eps: float) -> float:
    """The eps of a topology's norms with which it computes Pre-Norm with norms of this eps.

    Behind a norm of eps e a second one of the same, its gains times sqrt(1 + e), is one of eps e^2 / (1 + e).
    """
    twice = isinstance(topology, Siamese) and topology.final_norm is not None
    if twice and all(link.input_norm is not None for link in topology.links):
        return (eps + math.sqrt(eps * eps + 4 * eps)) / 2
    return eps


def exact_names() -> list[str]:
    """Names of the topologies that can compute Pre-Norm."""
    return [topology.name for topology in EXACT]


def sets(*topologies: type[Topology]) -> Callable[[GraftSetting], GraftSetting]:
    """Register a setting."""

    def register(setting: GraftSetting) -> GraftSetting:
        EXACT.update(dict.fromkeys(topologies, setting))
        return setting

    return register


def copy_norm(to: nn.Module | None, norm: nn.Module) -> tuple[nn.Module, nn.Module]:
    """Everything that a norm has learnt, to another one of the same kind."""
    if to is None or type(to) is not type(norm):
        raise TopologyError(f"norm: {type(norm).__name__} cannot become {type(to).__name__}")
    theirs = dict(norm.named_parameters())
    for name, parameter in to.named_parameters():
        parameter.copy_(theirs.pop(name)) if name in theirs else parameter.fill_(1.0 if name == "weight" else 0.0)
    if theirs:
        raise NotExact(f"norm: its {min(theirs)} has no place in {to}")
    return to, norm


@sets(Pre, Hyper, Manifold, ManifoldLite, AttentionResidual, Dense, Zaya)
def ordinary_start(topology: Any, norms: Sequence[nn.Module], final: nn.Module) -> Copied:
    """The ordinary start is Pre-Norm."""
    pairs = zip([*(link.norm for link in topology.links), topology.final_norm], [*norms, final], strict=True)
    return [copy_norm(to, norm) for to, norm in pairs]


@sets(LayerScale)
def unit_gains(topology: LayerScale, norms: Sequence[nn.Module], final: nn.Module) -> Copied:
    """g = 1."""
    for link in topology.links:
        cast(Tensor, link.gain).fill_(1.0)
    return ordinary_start(topology, norms, final)


@sets(Scaled)
def unscaled_gains(topology: Scaled, norms: Sequence[nn.Module], final: nn.Module) -> Copied:
    """Gains times sqrt(l+1), which the sublayer's reading is divided by."""
    *_, last = ordinary_start(topology, norms, final)
    for link in topology.links:
        norm = cast(Norm, link.norm)
        if norm.weight is None or isinstance(norm, GatedNorm):
            raise NotExact(f"scaled: {norm} cannot make up for its scale; it takes rms or layer norms with a gain")
        for parameter in norm.parameters():
            parameter.div_(float(cast(Tensor, link.scale)))
    return [last]


@sets(Widen)
def added_rows(topology: Widen, norms: Sequence[nn.Module], final: nn.Module) -> Copied:
    """a = 1: the sum of all rows, each begun with an n-th of the embedding (`embedding_factor`)."""
    for link in topology.links:
        cast(Tensor, link.a).fill_(1.0)
    return ordinary_start(topology, norms, final)


@sets(EmbeddingBack)
def nothing_comes_back(topology: EmbeddingBack, norms: Sequence[nn.Module], final: nn.Module) -> Copied:
    """r = 1, z = b = 0."""
    if topology.options.normed_start:
        raise NotExact("x0: normed_start = true is not allowed; the stream has to start from the embedding itself")
    topology.b.zero_()
    for link in topology.links:
        if hasattr(link, "r"):
            cast(Tensor, link.r).fill_(1.0)
            cast(Tensor, link.z).zero_()
    return ordinary_start(topology, norms, final)


@sets(Independent)
def uneven_reads(topology: Independent, norms: Sequence[nn.Module], final: nn.Module) -> Copied:
    """Rows stay equal, each written with 1 and read with another weight, of which the norm takes the sum away."""
    n, eps = topology.options.rate, topology.options.eps
    for link in topology.links:
        assert isinstance(link, IndependentLink)
        link.W[n:].zero_()
        link.b[n:].fill_(torch.logit(torch.tensor((1 - eps) / 2, dtype=torch.float64)).item())
        link.b[:n].add_(torch.linspace(-0.5, 0.5, n).to(link.b))
    return ordinary_start(topology, norms, final)


@sets(GatedResidual)
def half_open_gates(topology: GatedResidual, norms: Sequence[nn.Module], final: nn.Module) -> Copied:
    """W_u = 0, so that G = 1/2, and gains 2 g a_j with mean(a) = 1, each row another; W_w = 0, so that s = 1."""
    uneven = torch.linspace(0.5, 1.5, topology.options.rate, dtype=torch.float64).unsqueeze(-1)
    uneven = uneven / uneven.mean()
    for rows, norm in zip([*topology.links, topology.last_read], [*norms, final], strict=True):
        if type(norm) is not RMSNorm or norm.bias is not None:
            raise NotExact(f"gr: {type(norm).__name__} cannot become its gains; it takes RMSNorm without a bias")
        assert isinstance(rows, GatedRows)
        gain = torch.ones_like(rows.weight[0]) if norm.weight is None else norm.weight
        rows.weight.copy_(2 * gain * uneven.to(gain))
        rows.W_u.zero_()
        if isinstance(rows, GatedLink):
            rows.W_w.zero_()
    return []


@sets(Siamese)
def sleeping_x(topology: Siamese, norms: Sequence[nn.Module], final: nn.Module) -> Copied:
    """N_X = 0 and g = 0, so that Y alone is seen; the last norm on its way has the gains, any other 1.

    The gains at 0 have gradients, so that X wakes up. For hybrid_pre it is the same function of the same sublayers:
    those of a Pre-Norm model with norms on queries, keys and values.
    """
    if type(topology.y) is not Pre:
        raise NotExact(f"siamese: y = {topology.y.name} cannot be set to compute Pre-Norm; it takes pre")
    copied: Copied = []
    for link, norm in zip(topology.links, norms, strict=True):
        assert isinstance(link, PairLink)
        for norm_x in link.x.children():
            switch_off(norm_x)
        if link.gain is not None:
            link.gain.zero_()
        copied.append(copy_last(cast(nn.Module, link.y.norm), link.input_norm, norm))
    if topology.x.final_norm is not None:
        switch_off(topology.x.final_norm)
    copied.append(copy_last(cast(nn.Module, topology.y.final_norm), topology.final_norm, final))
    if type(topology.links[0].x) not in (PostStartLink, RawLink):  # all is set but for the first reading
        raise NotExact(f"siamese: x = {topology.x.name} is seen raw once, at first; form=post_pre or hybrid_pre is not")
    return copied


def copy_last(first: nn.Module, second: Any, norm: nn.Module) -> tuple[nn.Module, nn.Module]:
    """A norm to the last of two in a row, or to the one there is; see `eps_for`."""
    if second is None:
        return copy_norm(first, norm)
    copied = copy_norm(second, norm)
    if second.weight is not None:
        second.weight.mul_(math.sqrt(1 + second.eps))
    return copied


def switch_off(norm: Any) -> None:
    """N_X = 0."""
    if norm.weight is None:
        raise NotExact("siamese: norms without a gain cannot be switched off")
    norm.weight.zero_()
    if norm.bias is not None:
        norm.bias.zero_()
