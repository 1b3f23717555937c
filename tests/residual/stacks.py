"""Small stacks for the tests: sublayers, norm kinds, random parameters, and a row's equation beside its topology."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from siamesenorm.residual import NormSpec, Residual, Topology

from .equations import Parameters, stack_of
from .table import ROWS, Row

D, L = 6, 2
PAIR = ["attention", "ffn"]
NORMS = {
    "rms": NormSpec("rms"),
    "layer": NormSpec("layer"),
    "rms-free": NormSpec("rms", affine=False),
    "layer-free": NormSpec("layer", affine=False),
    "rms-bias": NormSpec("rms", bias=True),
    "layer-no-bias": NormSpec("layer", bias=False, eps=1e-3),
}

SAME_GRAPH = {
    "siamese:input_norm=false",
    "siamese:x=post:norm_at=end,y=scaled",
    "siamese:y=reordered",
    "siamese:x=deepnorm,y=sandwich",
    "siamese:x=b2t,y=rezero",
    "siamese:x=hybrid_star,y=subln",
    "siamese:depth_scaling=none",
    "siamese:depth_scaling=sqrt(l+1),final_norm=false",
    "siamese:form=hybrid_pre,input_norm=no,depth_scaling=none",
    "mix",
    "layerscale:start=1",
    "span:branch_std=1/L",
    "span:branch_std=1",
    "hyper:rate=1,dynamic=false",
    "hyper:rate=4,dynamic=false",
    "hyper:rate=1,dynamic=true",
    "mhc:collapse=learned,eps=0",
    "mhc_lite:rate=3",
    "ihc:rate=3",
    "gr:rate=2,rank=3",
    "x0:normed_start=true",
    "attnres:blocks=2",
    "siamese:x=span,y=layerscale:start=0.5",
    "siamese:x=keel,y=peri",
    "siamese:y=gr:rate=2",
    "hyper:rate=2,dynamic=true",
    "hybrid:input_norm=true",
    "mhc:rate=2,sinkhorn_steps=3,eps=0",
}
"""Rows whose options only change numbers, or put parts of other rows together again."""
KINDS = {
    "siamese",
    "siamese:form=plain",
    "siamese:form=hybrid_pre",
    "pre",
    "hybrid_star",
    "span",
    "residual_dual",
    "hyper:rate=2,dynamic=false",
    "hyper:rate=4,dynamic=true",
    "mhc_lite",
    "gr",
    "widen",
    "attnres",
    "dense",
    "x0",
    "zaya",
}
"""Of the others, one at least for each kind of streams and for each operator of ours."""
GRAPHS = [row for row in ROWS if row.text not in SAME_GRAPH]

every_row = pytest.mark.parametrize("row", ROWS, ids=[row.text for row in ROWS])
every_graph = pytest.mark.parametrize("row", GRAPHS, ids=[row.text for row in GRAPHS])
every_norm = pytest.mark.parametrize("norm", NORMS)


class Causal(nn.Module):
    """Attention's stand-in: each token sees the running mean of the sequence so far; `cache` carries it on."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.value, self.out = nn.Linear(dim, dim), nn.Linear(dim, dim, bias=False)

    def forward(self, h: Tensor, cache: dict[str, Tensor] | None = None) -> Tensor:
        value, sums = self.value(h), 0
        count = torch.arange(1, h.shape[-2] + 1, dtype=h.dtype).unsqueeze(-1)
        if cache:
            sums, count = cache["sum"], count + cache["count"]
        sums = sums + value.cumsum(-2)
        if cache is not None:
            cache.update(sum=sums[..., -1:, :], count=count[-1:])
        return self.out(torch.tanh(sums / count + h))


class MLP(nn.Module):
    """Two projections with a curve between them."""

    def __init__(self, dim: int) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(dim, 2 * dim), nn.Linear(2 * dim, dim, bias=False)

    def forward(self, h: Tensor) -> Tensor:
        return self.down(torch.tanh(self.up(h)))


def make_sublayers(blocks: list[list[str]], dim: int = D, dtype: torch.dtype = torch.float64) -> nn.ModuleList:
    kinds = [kind for block in blocks for kind in block]
    made = nn.ModuleList(MLP(dim) if kind == "ffn" else Causal(dim) for kind in kinds)
    return made.to(dtype)


def make(row: Row | str, blocks: Any = L, dim: int = D, dtype: torch.dtype = torch.float64, **how: Any) -> Topology:
    text = row if isinstance(row, str) else row.text
    with torch.random.fork_rng():
        torch.manual_seed(0)  # some topologies draw their start
        return Residual(text, dim, blocks, dtype=dtype, **{"needs": "waived", **how})


def randomise(topology: nn.Module, spread: float = 0.5) -> None:
    """Every parameter away from its start, so that no claim rests on ones, zeros or symmetric matrices."""
    with torch.no_grad():
        for parameter in topology.parameters():
            parameter.add_(spread * torch.randn_like(parameter))


def by_equation(row: Row, topology: Topology, norm: str, blocks, sublayers, x: Tensor, drops: Any = None) -> Tensor:
    spec = NORMS[norm]
    bias = spec.kind == "layer" if spec.bias is None else spec.bias
    P = Parameters(dict(topology.named_parameters()), spec.kind, spec.affine, bias, spec.eps)
    return row.equation(P, x, stack_of(P, blocks, sublayers, drops))


def tensors_of(streams: Any) -> Iterator[Tensor]:
    """The tensors of any nest of streams."""
    if isinstance(streams, Tensor):
        yield streams
    else:
        for part in streams:
            yield from tensors_of(part)


def rebuilt(streams: Any, tensors: Iterator[Tensor]) -> Any:
    """The same nest with other tensors."""
    return next(tensors) if isinstance(streams, Tensor) else tuple(rebuilt(part, tensors) for part in streams)


def gradients(out, x, *modules):
    """Of the sum of squares, by the input and all parameters."""
    return torch.autograd.grad(out.square().sum(), [x, *(p for m in modules for p in m.parameters())])
