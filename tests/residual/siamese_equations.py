"""SiameseNorm's forms and compositions as straight-line loops; see equations.py for the arguments."""

from __future__ import annotations

import torch

from .equations import Parameters, Stack
from .recent_equations import attended, gated_read

C = {
    "none": lambda l: 1.0,
    "sqrt(2(l+1))": lambda l: (2 * (l + 1)) ** 0.5,
    "sqrt(l+1)": lambda l: (l + 1) ** 0.5,
}
PAPER = C["sqrt(2(l+1))"]


def plain(P: Parameters, x, stack: Stack):
    """The paper's Algorithm 1."""
    X = Y = x
    for s in stack:
        O = s.drop(s.F(X + s.norm("y.norm", Y)))
        X = s.norm("x.norm", X + O)
        Y = Y + O
    return X + P.norm("y.final_norm", Y)


def post_pre(P, x, stack, input_norm=True, c=PAPER, final_norm=True):
    X = Y = x
    for s in stack:
        X = s.norm("x.norm", X)
        seen = X + s.norm("y.norm", Y)
        O = s.drop(s.F(s.norm("input_norm", seen) if input_norm else seen))
        X = X + O / c(s.l)
        Y = Y + O
    out = P.norm("x.final_norm", X) + P.norm("y.final_norm", Y)
    return P.norm("final_norm", out) if final_norm else out


def hybrid_pre(P, x, stack, input_norm=True, c=PAPER):
    X = Y = x
    for s in stack:
        if s.kind != "ffn":
            O = s.drop(s.F(s["gain"] * X + s.norm("y.norm", Y)))
        else:
            X = s.norm("x.norm", X)
            seen = X + s.norm("y.norm", Y)
            O = s.drop(s.F(s.norm("input_norm", seen) if input_norm else seen))
        X = X + O / c(s.l)
        Y = Y + O
    return P.norm("final_norm", P.norm("x.final_norm", X) + P.norm("y.final_norm", Y))


# Compositions: x of the post kind, y of the pre kind, with the default N_in, c_l and N_out -----------------


def post_end_scaled(P, x, stack):
    X = Y = x
    for s in stack:
        O = s.drop(s.F(s.norm("input_norm", X + s.norm("y.norm", Y) / (s.l + 1) ** 0.5)))
        X = s.norm("x.norm", X + O / PAPER(s.l))
        Y = Y + O
    return P.norm("final_norm", X + P.norm("y.final_norm", Y))


def post_reordered(P, x, stack):
    X = Y = x
    for s in stack:
        X = s.norm("x.norm", X)
        O = s.F(s.norm("input_norm", X + Y))
        X = X + s.drop(O) / PAPER(s.l)
        Y = Y + s.drop(s.norm("y.norm", O))
    return P.norm("final_norm", P.norm("x.final_norm", X) + P.norm("y.final_norm", Y))


def deepnorm_sandwich(P, x, stack):
    X = Y = x
    a = stack.S**0.25
    for s in stack:
        O = s.F(s.norm("input_norm", X + s.norm("y.norm", Y)))
        X = s.norm("x.norm", a * X + s.drop(O) / PAPER(s.l))
        Y = Y + s.drop(s.norm("y.output_norm", O))
    return P.norm("final_norm", X + P.norm("y.final_norm", Y))


def span_layerscale(P, x, stack):
    X = U = Y = x
    for s in stack:
        seen = s.norm("x.read_norm", U) if s.k == 0 else U
        O = s.drop(s.F(s.norm("input_norm", seen + s.norm("y.norm", Y))))
        U = s.norm("x.norm", (X if s.last else U) + O / PAPER(s.l))
        X = U if s.last else X
        Y = Y + s["y.gain"] * O
    return P.norm("final_norm", X + P.norm("y.final_norm", Y))


def keel_peri(P, x, stack):
    X, Y = x, P.norm("y.embedding_norm", x)
    for s in stack:
        O = s.F(s.norm("input_norm", s.norm("x.norm", X) + s.norm("y.norm", Y)))
        o = s.drop(O) / PAPER(s.l)
        X = X + o if s.l == 0 else s.norm("x.stream_norm", stack.S * X + o)
        Y = Y + s.drop(s.norm("y.output_norm", O))
    return P.norm("final_norm", X + P.norm("y.final_norm", Y))


def b2t_rezero(P, x, stack):
    X = U = Y = x
    first = True
    for s in stack:
        O = s.drop(s.F(s.norm("input_norm", U + Y)))
        U = s.norm("x.norm", (X if s.last and not first else 0) + U + O / PAPER(s.l))
        X, first = (U, True) if s.last else (X, False)
        Y = Y + s["y.gain"] * O
    return P.norm("final_norm", X + Y)


def hybrid_star_subln(P, x, stack):
    X = Y = x
    for s in stack:
        if s.l == 0:
            O = s.F(s.norm("input_norm", s.norm("x.norm", X) + s.norm("y.norm", Y)))
        elif s.kind != "ffn":
            O = s.F(s["gain"] * X + s.norm("y.norm", Y))
        else:
            X = s.norm("x.norm", X)
            O = s.F(s.norm("input_norm", X + s.norm("y.norm", Y)))
        O = s.drop(O)
        X = X + O / PAPER(s.l)
        Y = Y + O
    return P.norm("final_norm", P.norm("x.final_norm", X) + P.norm("y.final_norm", Y))


def with_gated_residual(P, x, stack, n=2):
    X, R = x, torch.stack([x] * n, -2)
    for s in stack:
        X = s.norm("x.norm", X)
        flat, seen = gated_read(P, f"links.{s.k}.y.", R, n)
        O = s.drop(s.F(s.norm("input_norm", X + seen)))
        weights = 2 * torch.sigmoid(torch.einsum("jm,...m->...j", s["y.W_w"], flat))
        X = X + O / PAPER(s.l)
        R = R + weights.unsqueeze(-1) * O.unsqueeze(-2)
    return P.norm("final_norm", P.norm("x.final_norm", X) + gated_read(P, "y.last_read.", R, n)[1])


def with_attention_residual(P, x, stack):
    X, V = x, [x]
    for s in stack:
        X = s.norm("x.norm", X)
        seen = s.norm("y.norm", attended(P, s["y.mix.query"], s["y.mix.key_gain"], V) if s.k else x)
        O = s.drop(s.F(s.norm("input_norm", X + seen)))
        X = X + O / PAPER(s.l)
        V.append(O)
    end = P.norm("y.final_norm", attended(P, P["y.mix.query"], P["y.mix.key_gain"], V))
    return P.norm("final_norm", P.norm("x.final_norm", X) + end)
