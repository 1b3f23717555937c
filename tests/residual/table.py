"""One row for every topology and every option that changes its equation; the tests in this folder run over ROWS.

A new topology is covered by its row: text, equation, parameter count, start values, needs and init rule.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from siamesenorm.residual import InitRule

from . import equations as eq
from . import recent_equations as re
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
    streams: tuple[str, ...] | Callable[[int], tuple[str, ...]] = ("x",)
    """Their names, or a function from the number of sublayers run where they grow with depth."""
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
    unread: dict[int, frozenset[int]] = field(default_factory=dict)
    """By the number of sublayers run: tensors of the streams that nothing reads any more."""
    partly_reached: frozenset[str] = frozenset()
    """Parameters of which some entries have no gradient, for the same reason."""
    parallel: bool = True
    """Whether attention and FFN may run side by side."""

    @property
    def name(self) -> str:
        return self.text.partition(":")[0]

    def streams_at(self, at: int) -> tuple[str, ...]:
        return self.streams(at) if callable(self.streams) else self.streams


def unit_vector(k, shape):
    return torch.eye(shape[0])[k % shape[0]]


def identity(k, shape):
    return torch.eye(shape[0])


@dataclass(frozen=True)
class Drawn:
    """A start that is drawn from a normal distribution."""

    std: float


def ihc_start(n, k, shape):
    equal = torch.full((n,), -math.log(n - 1))
    return equal if shape[0] == n else torch.cat([equal, torch.zeros(n)])


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


def mhc(text: str, n: int, extra=lambda d, L: 0, outputs: int | None = None, equation=re.mhc, **how: Any) -> Row:
    outputs = 2 * n + (n * n if outputs is None else outputs)

    def start(k, shape):
        if shape[0] == n:  # the collapse
            return torch.zeros(shape)
        near_identity = 5 * (torch.eye(n, dtype=torch.float64) - 1)
        return torch.cat([favoured_row(k, (n,)), torch.zeros(n), near_identity.flatten()])

    return Row(
        text,
        partial(equation, n=n, **how),
        norms=lambda L: 2 * L + 1,
        extra=lambda d, L: 2 * L * (n * d * outputs + outputs + 3) + extra(d, L),
        streams=tuple(f"h{i}" for i in range(n)),
        start={"W": 0.0, "a": 0.01, "b": start},
        starts_as="pre" if how.get("eps") == 0 else None,
        # the rows start equal and what H_res mixes of them sums to one, so the first H_res changes nothing
        partly_reached=frozenset({"links.0.W", "links.0.a", "links.0.b"}),
    )


def lite(k, shape):
    n = {2: 2, 6: 3, 24: 4}[shape[0] - 2 * {6: 2, 12: 3, 32: 4}[shape[0]]]
    return torch.tensor(
        [1.0 if j == k % n else -1.0 for j in range(n)] + [0.0] * (n + 1) + [-8.0] * (shape[0] - 2 * n - 1)
    )


LITE = {"W": 0.0, "a": 0.01, "b": lite}


def learned_collapse(n: int):
    return lambda d, L: n * n * d + n + 1


def attnres(text: str, equation, sources: Callable[[int], int]) -> Row:
    return Row(
        text,
        equation,
        norms=lambda L: 2 * L + 1,
        extra=lambda d, L: 2 * L * 2 * d,  # the first sublayer has one source to read
        streams=lambda at: tuple(f"v{j}" for j in range(sources(at))),
        start={"query": 0.0},
        starts_as="pre",
    )


def gr(text: str, n: int, rank: Callable[[int], int]) -> Row:
    def extra(d: int, L: int) -> int:
        read = n * d + 2 * n * d * rank(d)
        return (2 * L + 1) * read + 2 * L * n * n * d

    return Row(
        text,
        partial(re.gr, n=n),
        norms=lambda L: 0,
        extra=extra,
        streams=tuple(f"h{i}" for i in range(n)) if n > 1 else ("h0",),
        end_norms=1,
        start={"W_d": Drawn(0.02), "W_u": Drawn(0.02), "W_w": Drawn(0.02)},
    )


def siamese(options: str, equation, norms, **claims: Any) -> Row:
    claims = {"streams": ("x", "y"), **claims}
    return Row(f"siamese:{options}" if options else "siamese", equation, norms, **claims)


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
    Row("hybrid:input_norm=true,depth_scaling=sqrt(2(l+1))", eq.hybrid_with_both, lambda L: 2 * L + 1, **QKV),
    Row("hybrid:input_norm=true", partial(eq.hybrid_with_both, c=lambda l: 1.0), lambda L: 2 * L + 1, **QKV),
    Row(
        "hybrid:depth_scaling=sqrt(l+1)",
        partial(eq.hybrid_with_both, input_norm=False, c=lambda l: (l + 1) ** 0.5),
        lambda L: L + 1,
        **QKV,
    ),
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
    Row("parallel", eq.parallel, lambda L: 2 * L + 1),
    # several streams
    Row("residual_dual", eq.residual_dual, lambda L: 2 * L + 1, streams=("x", "d")),
    Row(
        "residual_dual:input_norm=true",
        partial(eq.residual_dual, input_norm=True),
        lambda L: 4 * L + 1,
        streams=("x", "d"),
    ),
    *(hyper(n, dynamic) for dynamic in (False, True) for n in (1, 2, 4)),
    mhc("mhc", 4),
    mhc("mhc:collapse=learned,eps=0", 4, learned_collapse(4), learned=True, eps=0),
    mhc("mhc:rate=2,sinkhorn_steps=3,eps=0", 2, steps=3, eps=0),
    *(
        replace(
            mhc(text, n, outputs=math.factorial(n), equation=re.mhc_lite),
            start=LITE,
            starts_as="pre",
            # nor does the last: the mean of the rows is that of the mixed rows
            partly_reached=frozenset(f"links.{k}.{name}" for k in (0, 3) for name in "Wab"),
        )
        for text, n in (("mhc_lite", 4), ("mhc_lite:rate=3", 3))
    ),
    *(
        Row(
            text,
            partial(re.ihc, n=n),
            norms=lambda L: 2 * L + 1,
            extra=lambda d, L, n=n: 2 * L * (2 * n * n * d + 2 * n + 2) + learned_collapse(n)(d, L),
            streams=tuple(f"h{i}" for i in range(n)),
            start={"W": Drawn(0.02), "a": 0.01, "b": partial(ihc_start, n)},
            partly_reached=frozenset({"links.0.W", "links.0.a", "links.0.b"}),  # equal rows: the norm takes a sum away
        )
        for text, n in (("ihc", 4), ("ihc:rate=3", 3))
    ),
    gr("gr", 4, lambda d: max(1, d // 8)),
    gr("gr:rate=2,rank=3", 2, lambda d: 3),
    Row(
        "widen",
        re.widen,
        lambda L: 2 * L + 1,
        extra=lambda d, L: 2 * L * 4,
        streams=("h0", "h1", "h2", "h3"),
        start={"a": 0.25},
    ),
    # states of earlier depths
    attnres("attnres", re.attnres, lambda at: 1 + (at + 1) // 2),
    attnres("attnres:sum=true", partial(re.attnres, scale=lambda sources: sources), lambda at: 1 + (at + 1) // 2),
    attnres("attnres:blocks=2", partial(re.attnres, blocks=2), lambda at: 2),
    attnres("attnres:blocks=0", re.attnres_full, lambda at: at + 1),
    Row(
        "dense",
        re.dense,
        lambda L: 2 * L + 1,
        extra=lambda d, L: sum(l + 2 for l in range(L)),
        streams=lambda at: ("x", *(f"X{j}" for j in range(1 + at // 2))),
        start={"a": lambda k, shape: torch.eye(shape[0])[-1]},
        starts_as="pre",
    ),
    *(
        Row(
            text,
            partial(re.x0, normed_start=normed),
            lambda L: 2 * L + 1,
            extra=lambda d, L: 2 * L + 1,
            streams=lambda at: ("x", "x0", "mid")[: 2 + at // 4],
            unread={3: frozenset({1})},  # the last block has begun
            start={"r": lambda k, shape: 1.15 - 0.1 * (k // 2), "z": lambda k, shape: 0.2 - 0.15 * (k // 2), "b": 0.2},
        )
        for text, normed in (("x0", False), ("x0:normed_start=true", True))
    ),
    # one stream, weighed
    Row("beam", re.beam, lambda L: 4 * L + 1),
    Row("muse", re.muse, lambda L: 4 * L + 1, extra=lambda d, L: 2 * L * d, start={"w": Drawn(0.02)}),
    Row(
        "zaya",
        re.zaya,
        lambda L: 2 * L + 1,
        extra=lambda d, L: 8 * L * d,
        start={"b_r": 0.0, "b_o": 0.0},
        starts_as="pre",
    ),
    # pairs whose second stream is one of them
    siamese(
        "y=gr:rate=2",
        si.with_gated_residual,
        lambda L: 4 * L + 2,
        extra=lambda d, L: (2 * L + 1) * 2 * d * (1 + 2 * max(1, d // 8)) + 2 * L * 4 * d,
        streams=("x", "y.h0", "y.h1"),
        end_norms=3,
        start={"W_d": Drawn(0.02), "W_u": Drawn(0.02), "W_w": Drawn(0.02)},
    ),
    siamese(
        "y=attnres:blocks=0",
        si.with_attention_residual,
        lambda L: 6 * L + 3,
        extra=lambda d, L: 2 * L * 2 * d,
        streams=lambda at: ("x", *(f"y.v{j}" for j in range(at + 1))),
        end_norms=3,
        start={"query": 0.0},
    ),
]
