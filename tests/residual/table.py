"""One row for every topology and every option that changes its equation; the tests in this folder run over ROWS.

A new topology is covered by its row: text, equation, parameter count, start values, needs and init rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch

from siamesenorm.residual import InitRule

from . import equations as eq
from . import siamese_equations as si


def neutral(L: int) -> InitRule:
    return InitRule()


def four_roles(factor: Callable[[int], float]) -> Callable[[int], InitRule]:
    roles = ("value", "attention_out", "ffn_in", "ffn_out")
    return lambda L: InitRule(dict.fromkeys(roles, factor(L)), keeps_depth_factor=False)


def out_roles(factor: Callable[[int], float]) -> Callable[[int], InitRule]:
    return lambda L: InitRule(dict.fromkeys(("attention_out", "ffn_out"), factor(L)), keeps_depth_factor=False)


DEEPNORM = four_roles(lambda L: (8 * L) ** -0.25)
SUBLN = four_roles(lambda L: math.sqrt(math.log(2 * L)))
SPAN = out_roles(lambda L: L**-0.5)
OLMO2 = lambda L: InitRule(std=0.02, keeps_depth_factor=False)  # noqa: E731


@dataclass(frozen=True)
class Row:
    """What is claimed of one topology, L standing for its (attention, ffn) blocks and d for its width."""

    text: str
    equation: Callable[..., torch.Tensor]
    norms: Callable[[int], int]
    """How many norms it has; each has d parameters (2d with bias, 0 without affine)."""
    extra: Callable[[int, int], int] = lambda d, L: 0
    """Its parameters outside norms, from d and L."""
    streams: tuple[str, ...] = ("x",)
    end_norms: int = 1
    """Norms that `close` runs: none twice."""
    attention_norm: str = "none"
    output_norm: bool = False
    rule: Callable[[int], InitRule] = neutral
    start: dict[str, Any] = field(default_factory=dict)
    """Start value by the last part of a parameter's name, or a function from (k, shape); gains 1 and biases 0."""
    starts_as: str | None = None
    """"pre" or "identity": the function it equals before training."""
    unreached: frozenset[str] = frozenset()
    """Parameters whose gradient is zero by the equation itself."""
    partly_reached: frozenset[str] = frozenset()
    """Parameters of which some entries have no gradient, for the same reason."""
    parallel: bool = True
    """Whether attention and FFN may run side by side."""

    @property
    def name(self) -> str:
        return self.text.partition(":")[0]


def unit_vector(k, shape):
    return torch.eye(shape[0])[k % shape[0]]


def identity(k, shape):
    return torch.eye(shape[0])


HYPER = {"B": 1.0, "A_m": unit_vector, "A_r": identity}
DYNAMIC = {**HYPER, "W_b": 0.0, "W_m": 0.0, "W_r": 0.0, "scale_a": 0.01, "scale_b": 0.01}


def hyper(n: int, dynamic: bool) -> Row:
    static = n + n + n * n
    return Row(
        f"hyper:rate={n},dynamic={str(dynamic).lower()}",
        partial(eq.hyper, n=n, dynamic=dynamic),
        norms=(lambda L: 4 * L + 1) if dynamic else (lambda L: 2 * L + 1),
        extra=lambda d, L: 2 * L * (static + (d * (n + 2) + 2 if dynamic else 0)),
        streams=tuple(f"h{i}" for i in range(n)),
        start=DYNAMIC if dynamic else HYPER,
        starts_as="pre",
    )


def favoured_row(k, shape):
    """Row k mod n is read with weight 3/4, the others with equal parts of 1/4."""
    weights = torch.full(shape, 0.25 / (shape[0] - 1), dtype=torch.float64)
    weights[k % shape[0]] = 0.75
    return weights.logit()


def mhc(text: str, n: int, **how: Any) -> Row:
    start = {"W": 0.0, "b_pre": favoured_row, "b_post": 0.0, "alpha": 0.01, "collapse": 1 / n}
    outputs = 2 * n + n * n
    return Row(
        text,
        partial(eq.mhc, n=n, **how),
        norms=lambda L: 2 * L + 1,
        extra=lambda d, L: 2 * L * (n * d * outputs + outputs + 3) + (n if how.get("learned") else 0),
        streams=tuple(f"h{i}" for i in range(n)),
        start={**start, "b_res": lambda k, shape: 5 * (torch.eye(n) - 1)},
        starts_as="pre",
        # the rows start equal and every row of H_res sums to one, so the first H_res changes nothing
        unreached=frozenset({"links.0.b_res"}),
        partly_reached=frozenset({"links.0.W", "links.0.alpha"}),
    )


def siamese(options: str, equation, norms, **claims: Any) -> Row:
    return Row(f"siamese:{options}" if options else "siamese", equation, norms, streams=("x", "y"), **claims)


QKV = {"attention_norm": "qkv_head", "parallel": False}
ROWS: list[Row] = [
    # the flagship: three forms, its switches, and pairs of other streams
    siamese("", si.post_pre, lambda L: 6 * L + 3, end_norms=3),
    siamese("form=plain", si.plain, lambda L: 4 * L + 1),
    siamese("form=hybrid_pre", si.hybrid_pre, lambda L: 4 * L + 3, extra=lambda d, L: L * d, end_norms=3, **QKV),
    siamese("input_norm=false", partial(si.post_pre, input_norm=False), lambda L: 4 * L + 3, end_norms=3),
    siamese("depth_scaling=none", partial(si.post_pre, c=si.C["none"]), lambda L: 6 * L + 3, end_norms=3),
    siamese(
        "depth_scaling=sqrt(l+1),final_norm=false",
        partial(si.post_pre, c=si.C["sqrt(l+1)"], final_norm=False),
        lambda L: 6 * L + 2,
        end_norms=2,
    ),
    siamese(
        "form=hybrid_pre,input_norm=no,depth_scaling=none",
        partial(si.hybrid_pre, input_norm=False, c=si.C["none"]),
        lambda L: 3 * L + 3,
        extra=lambda d, L: L * d,
        end_norms=3,
        **QKV,
    ),
    siamese("x=post:norm_at=end,y=scaled", si.post_end_scaled, lambda L: 6 * L + 2, end_norms=2),
    siamese(
        "y=reordered", si.post_reordered, lambda L: 6 * L + 3, end_norms=3, attention_norm="qk_projection", rule=OLMO2
    ),
    siamese("x=deepnorm,y=sandwich", si.deepnorm_sandwich, lambda L: 8 * L + 2, end_norms=2, rule=DEEPNORM),
    siamese(
        "x=span,y=layerscale:start=0.5",
        si.span_layerscale,
        lambda L: 6 * L + 3,
        extra=lambda d, L: 2 * L * d,
        end_norms=2,
        rule=SPAN,
        start={"gain": 0.5},
    ),
    siamese("x=keel,y=peri", si.keel_peri, lambda L: 10 * L + 1, end_norms=2),
    siamese(
        "x=b2t,y=rezero",
        si.b2t_rezero,
        lambda L: 4 * L + 1,
        extra=lambda d, L: 2 * L,
        start={"gain": 0.0},
    ),
    siamese(
        "x=hybrid_star,y=subln",
        si.hybrid_star_subln,
        lambda L: 4 * L + 5,
        extra=lambda d, L: (L - 1) * d,
        end_norms=3,
        output_norm=True,
        rule=SUBLN,
        **QKV,
    ),
    # one stream
    Row("pre", eq.pre, lambda L: 2 * L + 1, starts_as="pre"),
    Row("post", eq.post_start, lambda L: 2 * L + 1),
    Row("post:norm_at=end", eq.post_end, lambda L: 2 * L, end_norms=0),
    Row("hybrid", eq.hybrid, lambda L: L + 1, **QKV),
    Row("hybrid_star", eq.hybrid_star, lambda L: L + 2, **QKV),
    Row("deepnorm", eq.deepnorm, lambda L: 2 * L, end_norms=0, rule=DEEPNORM),
    Row("sandwich", eq.sandwich, lambda L: 4 * L + 1),
    Row("peri", eq.peri, lambda L: 4 * L + 2),
    Row("reordered", eq.reordered, lambda L: 2 * L + 1, attention_norm="qk_projection", rule=OLMO2),
    Row("mix", eq.mix, lambda L: 2 * L + 1),
    Row("mix:post_fraction=0.5", partial(eq.mix, fraction=0.5), lambda L: 2 * L + 1),
    Row("scaled", eq.scaled, lambda L: 2 * L + 1),
    Row("keel", eq.keel, lambda L: 4 * L - 2, end_norms=0),
    Row("layerscale", eq.layerscale, lambda L: 2 * L + 1, extra=lambda d, L: 2 * L * d, start={"gain": 1e-4}),
    Row(
        "layerscale:start=1",
        eq.layerscale,
        lambda L: 2 * L + 1,
        extra=lambda d, L: 2 * L * d,
        start={"gain": 1.0},
        starts_as="pre",
    ),
    Row(
        "rezero",
        eq.rezero,
        lambda L: 0,
        extra=lambda d, L: 2 * L,
        end_norms=0,
        start={"gain": 0.0},
        starts_as="identity",
    ),
    Row("subln", eq.pre, lambda L: 2 * L + 1, output_norm=True, rule=SUBLN, starts_as="pre"),
    # the block input skips over the block
    Row("span", eq.span, lambda L: 2 * L + 1, end_norms=0, rule=SPAN),
    Row("span:branch_std=1/L", eq.span, lambda L: 2 * L + 1, end_norms=0, rule=out_roles(lambda L: 1 / L)),
    Row("span:branch_std=1", eq.span, lambda L: 2 * L + 1, end_norms=0, rule=out_roles(lambda L: 1.0)),
    Row("b2t", eq.b2t, lambda L: 2 * L, end_norms=0),
    # several streams
    Row("residual_dual", eq.residual_dual, lambda L: 2 * L + 1, streams=("x", "d")),
    *(hyper(n, dynamic) for dynamic in (False, True) for n in (1, 2, 4)),
    mhc("mhc", 4),
    mhc("mhc:collapse=learned", 4, learned=True),
    mhc("mhc:rate=2,sinkhorn_steps=3", 2, steps=3),
]
