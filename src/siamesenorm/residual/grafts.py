"""From Pre-Norm to another topology with the same function: settings of the new parameters that change nothing.

A norm follows every read, and norms ignore scale: so many topologies can compute Pre-Norm exactly, up to the eps of
norms. The settings are uneven where rows are equal, so that gradients tell them apart and training goes on from there.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, cast

import torch
from torch import Tensor, nn

from siamesenorm.residual.attention_residual import AttentionResidual
from siamesenorm.residual.base import Topology
from siamesenorm.residual.earlier import Dense, EmbeddingBack
from siamesenorm.residual.errors import TopologyError
from siamesenorm.residual.gated_residual import GatedLink, GatedResidual, GatedRows
from siamesenorm.residual.hyper import Hyper
from siamesenorm.residual.independent import Independent, IndependentLink
from siamesenorm.residual.manifold import Manifold, ManifoldLite
from siamesenorm.residual.norms import RMSNorm
from siamesenorm.residual.post import Post
from siamesenorm.residual.pre import LayerScale, Pre
from siamesenorm.residual.siamese import PairLink, Siamese
from siamesenorm.residual.weighed import Zaya

Setting = Callable[[Any, Sequence[nn.Module], nn.Module], None]
EXACT: dict[type[Topology], Setting] = {}
"""How each topology is set; see `compute_pre_norm`."""


def compute_pre_norm(topology: Topology, norms: Sequence[nn.Module], final: nn.Module) -> None:
    """Set every parameter of a topology so that it computes Pre-Norm with these norms, one a sublayer and the last.

    Raises `TopologyError` where no such setting is known. Steps of `prores` are set to their end.
    """
    setting = EXACT.get(type(topology))
    if setting is None:
        raise TopologyError(
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
        setting(topology, norms, final)
    topology.set_step(10**9)


def exact_names() -> list[str]:
    """Names of the topologies that can compute Pre-Norm."""
    return [topology.name for topology in EXACT]


def sets(*topologies: type[Topology]) -> Callable[[Setting], Setting]:
    """Register a setting."""

    def register(setting: Setting) -> Setting:
        EXACT.update(dict.fromkeys(topologies, setting))
        return setting

    return register


def copy_norm(to: nn.Module | None, norm: nn.Module) -> None:
    """Gain and bias of a norm, which must be of the same kind."""
    if type(to) is not type(norm):
        raise TopologyError(f"norm: {type(norm).__name__} cannot become {type(to).__name__}")
    for name in ("weight", "bias"):
        here, there = getattr(to, name), getattr(norm, name)
        if there is not None and here is None:
            raise TopologyError(f"norm: its {name} has no place in {to}")
        if here is not None:
            here.copy_(there) if there is not None else fill(to, name)


def fill(norm: nn.Module, name: str) -> None:
    """What a norm without a gain or bias has: 1 or 0."""
    getattr(norm, name).fill_(1.0 if name == "weight" else 0.0)


@sets(Pre, Hyper, Manifold, ManifoldLite, AttentionResidual, Dense, Zaya)
def ordinary_start(topology: Any, norms: Sequence[nn.Module], final: nn.Module) -> None:
    """The ordinary start is Pre-Norm."""
    for link, norm in zip(topology.links, norms, strict=True):
        copy_norm(link.norm, norm)
    copy_norm(topology.final_norm, final)


@sets(LayerScale)
def unit_gains(topology: LayerScale, norms: Sequence[nn.Module], final: nn.Module) -> None:
    """g = 1."""
    ordinary_start(topology, norms, final)
    for link in topology.links:
        cast(Tensor, link.gain).fill_(1.0)


@sets(EmbeddingBack)
def nothing_comes_back(topology: EmbeddingBack, norms: Sequence[nn.Module], final: nn.Module) -> None:
    """r = 1, z = b = 0."""
    if topology.options.normed_start:
        raise TopologyError("x0: normed_start = true is not allowed; the stream has to start from the embedding itself")
    ordinary_start(topology, norms, final)
    topology.b.zero_()
    for link in topology.links:
        if hasattr(link, "r"):
            cast(Tensor, link.r).fill_(1.0)
            cast(Tensor, link.z).zero_()


@sets(Independent)
def uneven_reads(topology: Independent, norms: Sequence[nn.Module], final: nn.Module) -> None:
    """Rows stay equal, each written with 1 and read with another weight, of which the norm takes the sum away."""
    ordinary_start(topology, norms, final)
    n, eps = topology.options.rate, topology.options.eps
    for link in topology.links:
        assert isinstance(link, IndependentLink)
        link.W[n:].zero_()
        link.b[n:].fill_(torch.logit(torch.tensor((1 - eps) / 2, dtype=torch.float64)).item())
        link.b[:n].add_(torch.linspace(-0.5, 0.5, n).to(link.b))


@sets(GatedResidual)
def half_open_gates(topology: GatedResidual, norms: Sequence[nn.Module], final: nn.Module) -> None:
    """W_u = 0, so that G = 1/2, and gains 2 g a_j with mean(a) = 1, each row another; W_w = 0, so that s = 1."""
    uneven = torch.linspace(0.5, 1.5, topology.options.rate, dtype=torch.float64).unsqueeze(-1)
    uneven = uneven / uneven.mean()
    for rows, norm in zip([*topology.links, topology.last_read], [*norms, final], strict=True):
        if type(norm) is not RMSNorm or norm.bias is not None:
            raise TopologyError(f"gr: {type(norm).__name__} cannot become its gains; it takes RMSNorm without a bias")
        assert isinstance(rows, GatedRows)
        gain = torch.ones_like(rows.weight[0]) if norm.weight is None else norm.weight
        rows.weight.copy_(2 * gain * uneven.to(gain))
        rows.W_u.zero_()
        if isinstance(rows, GatedLink):
            rows.W_w.zero_()


@sets(Siamese)
def sleeping_x(topology: Siamese, norms: Sequence[nn.Module], final: nn.Module) -> None:
    """N_X = 0, N_Y = 1, N_in = g: Y alone is seen. The gains of N_X have gradients, so that X wakes up."""
    if type(topology.x) is not Post or type(topology.y) is not Pre or topology.final_norm is None:
        raise TopologyError(f"siamese: {topology.options} is not allowed; only form=post_pre computes Pre-Norm")
    for link, norm in zip(topology.links, norms, strict=True):
        assert isinstance(link, PairLink)
        sleep(cast(nn.Module, link.x.norm), cast(nn.Module, link.y.norm))
        copy_norm(link.input_norm, norm)
    sleep(cast(nn.Module, topology.x.final_norm), cast(nn.Module, topology.y.final_norm))
    copy_norm(topology.final_norm, final)


def sleep(norm_x: nn.Module, norm_y: nn.Module) -> None:
    """N_X = 0 and N_Y = 1."""
    for norm, gain in ((norm_x, 0.0), (norm_y, 1.0)):
        if norm.weight is None:
            raise TopologyError("siamese: norms without a gain cannot be switched off")
        cast(Tensor, norm.weight).fill_(gain)
        if norm.bias is not None:
            cast(Tensor, norm.bias).zero_()
