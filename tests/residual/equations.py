"""The topologies' equations as straight-line loops over raw tensors, written from the papers and not from the library.

Every function takes (P, x, stack): P gives parameters by their state-dict name, x is the embedding, and stack
yields one Step a sublayer. `s.drop` marks the place where dropout and stochastic depth act on the update.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor


@dataclass
class Parameters:
    """State-dict access and norms written out."""

    state: dict[str, Tensor]
    kind: str = "rms"
    affine: bool = True
    bias: bool = False
    eps: float = 1e-5

    def __getitem__(self, name: str) -> Tensor:
        return self.state[name]

    def norm(self, name: str, x: Tensor) -> Tensor:
        centred = x - x.mean(-1, keepdim=True) if self.kind == "layer" else x
        out = centred / torch.sqrt((centred * centred).mean(-1, keepdim=True) + self.eps)
        if self.affine:
            out = out * self.state[f"{name}.weight"]
            out = out + self.state[f"{name}.bias"] if self.bias else out
        return out


class Step(NamedTuple):
    """One sublayer: its number k, block l, kind, whether it ends its block, and the function F."""

    P: Parameters
    k: int
    l: int
    kind: str
    last: bool
    F: Callable[[Tensor], Tensor]
    drop: Callable[[Tensor], Tensor]

    def __getitem__(self, name):  # a link's parameter
        return self.P[f"links.{self.k}.{name}"]

    def norm(self, name: str, x: Tensor) -> Tensor:
        return self.P.norm(f"links.{self.k}.{name}", x)


class Stack(list):
    """Steps, with L blocks and S sublayers."""

    L: int
    S: int


def stack_of(P: Parameters, blocks: list[list[str]], sublayers, drops=None) -> Stack:
    stack, sublayers = Stack(), list(sublayers)
    for l, block in enumerate(blocks):
        for position, kind in enumerate(block):
            k = len(stack)
            drop = drops[k] if drops else lambda update: update
            stack.append(Step(P, k, l, kind, position == len(block) - 1, sublayers[k], drop))
    stack.L, stack.S = len(blocks), len(stack)
    return stack


# One stream --------------------------------------------------------------------------------------------


def pre(P, x, stack):
    for s in stack:
        x = x + s.drop(s.F(s.norm("norm", x)))
    return P.norm("final_norm", x)


def post_start(P, x, stack):
    for s in stack:
        x = s.norm("norm", x)
        x = x + s.drop(s.F(x))
    return P.norm("final_norm", x)


def post_end(P, x, stack):
    for s in stack:
        x = s.norm("norm", x + s.drop(s.F(x)))
    return x


def hybrid(P, x, stack):
    for s in stack:
        x = x if s.kind != "ffn" else s.norm("norm", x)
        x = x + s.drop(s.F(x))
    return P.norm("final_norm", x)


def hybrid_with_both(P, x, stack, input_norm=True, c=lambda l: (2 * (l + 1)) ** 0.5):
    """The X of SiameseNorm's hybrid form, alone."""
    for s in stack:
        if s.kind != "ffn":
            x = x + s.drop(s.F(x)) / c(s.l)
        else:
            z = s.norm("norm", x)
            x = z + s.drop(s.F(s.norm("input_norm", z) if input_norm else z)) / c(s.l)
    return P.norm("final_norm", x)


def hybrid_star(P, x, stack):
    for s in stack:
        if s.l == 0:
            x = x + s.drop(s.F(s.norm("norm", x)))
        elif s.kind != "ffn":
            x = x + s.drop(s.F(x))
        else:
            x = s.norm("norm", x)
            x = x + s.drop(s.F(x))
    return P.norm("final_norm", x)


def deepnorm(P, x, stack):
    a = stack.S**0.25  # S = 2L for (attention, ffn) blocks
    for s in stack:
        x = s.norm("norm", a * x + s.drop(s.F(x)))
    return x


def sandwich(P, x, stack):
    for s in stack:
        x = x + s.drop(s.norm("output_norm", s.F(s.norm("norm", x))))
    return P.norm("final_norm", x)


def peri(P, x, stack):
    return sandwich(P, P.norm("embedding_norm", x), stack)


def reordered(P, x, stack):
    for s in stack:
        x = x + s.drop(s.norm("norm", s.F(x)))
    return P.norm("final_norm", x)


def mix(P, x, stack, fraction=0.25):
    for s in stack:
        is_post = s.l + 1 <= fraction * stack.L
        x = s.norm("norm", x + s.drop(s.F(x))) if is_post else x + s.drop(s.F(s.norm("norm", x)))
    return P.norm("final_norm", x)


def scaled(P, x, stack):
    for s in stack:
        x = x + s.drop(s.F(s.norm("norm", x) / (s.l + 1) ** 0.5))
    return P.norm("final_norm", x)


def keel(P, x, stack):
    for s in stack:
        o = s.drop(s.F(s.norm("norm", x)))
        x = x + o if s.l == 0 else s.norm("stream_norm", stack.S * x + o)
    return x


def layerscale(P, x, stack):
    for s in stack:
        x = x + s["gain"] * s.drop(s.F(s.norm("norm", x)))
    return P.norm("final_norm", x)


def rezero(P, x, stack):
    for s in stack:
        x = x + s["gain"] * s.drop(s.F(x))
    return x


# The block input skips over the block ------------------------------------------------------------------


def span(P, x, stack):
    u = x
    for s in stack:
        o = s.drop(s.F(s.norm("read_norm", u) if s.k == 0 else u))
        u = s.norm("norm", (x if s.last else u) + o)
        x = u if s.last else x
    return x


def b2t(P, x, stack):
    u, first = x, True
    for s in stack:
        long_skip = x if s.last and not first else 0  # one sublayer alone: block input and u are the same tensor
        u = s.norm("norm", long_skip + u + s.drop(s.F(u)))
        x, first = (u, True) if s.last else (x, False)
    return x


def parallel(P, x, stack):
    y = x
    for s in stack:
        y = y + s.drop(s.F(s.norm("norm", x)))
        x = y if s.last else x
    return P.norm("final_norm", y)


# Several streams ---------------------------------------------------------------------------------------


def residual_dual(P, x, stack, input_norm=False):
    d = x
    for s in stack:
        o = s.drop(s.F(s.norm("input_norm", x) if input_norm else x))
        d = d + o
        x = s.norm("norm", x + o)
    return x + P.norm("final_norm", d)


def hyper(P, x, stack, n=2, dynamic=True):
    H = torch.stack([x] * n, -2)
    for s in stack:
        A_m, A_r, B = s["A_m"], s["A_r"], s["B"]
        if dynamic:
            rows = s.norm("row_norm", H)
            A_m = A_m + s["scale_a"] * torch.tanh(torch.einsum("...nd,d->...n", rows, s["W_m"]))
            A_r = A_r + s["scale_a"] * torch.tanh(torch.einsum("...nd,dm->...nm", rows, s["W_r"]))
            B = B + s["scale_b"] * torch.tanh(torch.einsum("...nd,d->...n", rows, s["W_b"]))
        h = torch.einsum("...i,...id->...d", A_m, H)
        o = s.drop(s.F(s.norm("norm", h)))
        H = torch.einsum("...j,...d->...jd", B, o) + torch.einsum("...ij,...id->...jd", A_r, H)
    return P.norm("final_norm", H.sum(-2))
