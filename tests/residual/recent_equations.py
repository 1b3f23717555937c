"""The designs of 2026 as straight-line loops over raw tensors; see equations.py for the form."""

from __future__ import annotations

import itertools
import math

import torch
from torch import Tensor


def rms_free(P, x: Tensor) -> Tensor:
    return x / torch.sqrt((x * x).mean(-1, keepdim=True) + P.eps)


def begins_block(stack, s) -> bool:
    return s.k == 0 or stack[s.k - 1].last


def concatenated(R: Tensor) -> Tensor:
    return torch.cat(list(R.unbind(-2)), -1)


# One stream, weighed -----------------------------------------------------------------------------------


def beam(P, x, stack):
    for s in stack:
        k = s.k + 2
        update = s.norm("output_norm", s.F(s.norm("norm", x))) / math.sqrt(k)
        x = math.sqrt((k - 1) / k) * x + s.drop(update)
    return P.norm("final_norm", x)


def muse(P, x, stack, temperature=0.3):
    for s in stack:
        b = 1 / (1 + torch.exp(-s["w"] / temperature))
        update = b * s.norm("output_norm", s.F(s.norm("norm", x)))
        x = torch.sqrt((1 - b * b).clamp(min=1e-3)) * x + s.drop(update)
    return P.norm("final_norm", x)


def zaya(P, x, stack):
    for s in stack:
        o = s.F(s.norm("norm", x))
        x = s["s_r"] * (x + s["b_r"]) + s.drop(s["s_o"] * (o + s["b_o"]))
    return P.norm("final_norm", x)


# Sources that grow with depth --------------------------------------------------------------------------


def attended(P, q, g, sources):
    """Keys are normed, values are raw."""
    logits = torch.stack([(q * (g * rms_free(P, v))).sum(-1) for v in sources])
    weights = torch.exp(logits) / torch.exp(logits).sum(0)
    return sum(w.unsqueeze(-1) * v for w, v in zip(weights, sources, strict=True))


def attnres_full(P, x, stack):
    V = [x]
    for s in stack:
        h = attended(P, s["mix.query"], s["mix.key_gain"], V) if s.k else x
        V.append(s.drop(s.F(s.norm("norm", h))))
    return P.norm("final_norm", attended(P, P["mix.query"], P["mix.key_gain"], V))


def attnres(P, x, stack, blocks=None, scale=lambda sources: 1):
    size = blocks or math.ceil(stack.L / 8)
    groups, p = [], x
    for s in stack:
        V = [*groups, p]
        h = scale(len(V)) * attended(P, s["mix.query"], s["mix.key_gain"], V) if s.k else x
        if begins_block(stack, s) and s.l % size == 0:
            groups.append(p)
            p = None
        o = s.drop(s.F(s.norm("norm", h)))
        p = o if p is None else p + o
    V = [*groups, p]
    return P.norm("final_norm", scale(len(V)) * attended(P, P["mix.query"], P["mix.key_gain"], V))


def dense(P, x, stack):
    X = [x]
    for s in stack:
        x = x + s.drop(s.F(s.norm("norm", x)))
        if s.last:
            X.append(x)
            x = sum(s["a"][j] * state for j, state in enumerate(X))
    return P.norm("final_norm", x)


def x0(P, x, stack, normed_start=False):
    first = rms_free(P, x)
    x = first if normed_start else x
    for s in stack:
        if begins_block(stack, s):
            x = s["r"] * x + s["z"] * first
        x = x + s.drop(s.F(s.norm("norm", x)))
        if s.last and s.l == stack.L // 2:
            middle = x
    return P.norm("final_norm", x - P["b"] * middle)


# Rows --------------------------------------------------------------------------------------------------


def widen(P, x, stack, n=4):
    R = [x] * n
    for s in stack:
        h = sum(s["a"][j] * R[j] for j in range(n))
        o = s.drop(s.F(s.norm("norm", h)))
        R[s.k % n] = R[s.k % n] + o
    return P.norm("final_norm", sum(R))


def collapsed(P, R, eps):
    flat = concatenated(R)
    m = torch.einsum("jm,...m->...j", P["collapse.W"], rms_free(P, flat))
    weights = torch.sigmoid(P["collapse.a"] * m + P["collapse.b"]) + eps
    return torch.einsum("...j,...jd->...d", weights, R)


def ihc(P, x, stack, n=4, eps=1e-6):
    R = torch.stack([x] * n, -2)
    for s in stack:
        m = torch.einsum("jm,...m->...j", s["W"], rms_free(P, concatenated(R)))
        a, b = s["a"], s["b"]
        reads = torch.sigmoid(a[0] * m[..., :n] + b[:n]) + eps
        writes = 2 * torch.sigmoid(a[1] * m[..., n:] + b[n:]) + eps
        h = torch.einsum("...j,...jd->...d", reads, R)
        o = s.drop(s.F(s.norm("norm", h)))
        R = torch.stack([R[..., j, :] + writes[..., j : j + 1] * o for j in range(n)], -2)
    return P.norm("final_norm", collapsed(P, R, eps))


def sinkhorn(logits: Tensor, rounds: int, eps: float) -> Tensor:
    """Softmax by rows, then columns, rows, columns, …"""
    M = torch.exp(logits - logits.amax(-1, keepdim=True))
    M = M / M.sum(-1, keepdim=True) + eps
    for k in range(2 * rounds - 1):
        dim = -1 if k % 2 else -2
        M = M / (M.sum(dim, keepdim=True) + eps)
    return M


def mhc(P, x, stack, n=4, steps=20, eps=1e-6, learned=False):
    R = torch.stack([x] * n, -2)
    for s in stack:
        m = torch.einsum("jm,...m->...j", s["W"], rms_free(P, concatenated(R)))
        a, b = s["a"], s["b"]
        pre = torch.sigmoid(a[0] * m[..., :n] + b[:n]) + eps
        post = 2 * torch.sigmoid(a[1] * m[..., n : 2 * n] + b[n : 2 * n])
        comb = a[2] * m[..., 2 * n :] + b[2 * n :]
        comb = sinkhorn(torch.stack([comb[..., i * n : (i + 1) * n] for i in range(n)], -2), steps, eps)
        o = s.drop(s.F(s.norm("norm", torch.einsum("...j,...jd->...d", pre, R))))
        R = torch.einsum("...jk,...jd->...kd", comb, R) + torch.einsum("...k,...d->...kd", post, o)
    return P.norm("final_norm", collapsed(P, R, eps) if learned else R.mean(-2))


def mhc_lite(P, x, stack, n=4):
    R = torch.stack([x] * n, -2)
    orders = list(itertools.permutations(range(n)))
    for s in stack:
        m = torch.einsum("jm,...m->...j", s["W"], rms_free(P, concatenated(R)))
        a, b = s["a"], s["b"]
        pre = torch.sigmoid(a[0] * m[..., :n] + b[:n])
        post = 2 * torch.sigmoid(a[1] * m[..., n : 2 * n] + b[n : 2 * n])
        shares = torch.softmax(a[2] * m[..., 2 * n :] + b[2 * n :], -1)
        o = s.drop(s.F(s.norm("norm", torch.einsum("...j,...jd->...d", pre, R))))
        mixed = sum(shares[..., r, None, None] * R[..., list(order), :] for r, order in enumerate(orders))
        R = mixed + torch.einsum("...k,...d->...kd", post, o)
    return P.norm("final_norm", R.mean(-2))


def gated_read(P, name, R, n):
    z = P[f"{name}weight"] * rms_free(P, R)
    flat = concatenated(z) / n
    low = torch.einsum("rm,...m->...r", P[f"{name}W_d"], flat)
    low = low / (1 + torch.exp(-low))
    gates = torch.sigmoid(torch.einsum("mr,...r->...m", P[f"{name}W_u"], low))
    gated = torch.stack(gates.chunk(n, -1), -2) * z
    return flat, gated.sum(-2) / n


def gr(P, x, stack, n=4):
    R = torch.stack([x] * n, -2)
    for s in stack:
        flat, h = gated_read(P, f"links.{s.k}.", R, n)
        weights = 2 * torch.sigmoid(torch.einsum("jm,...m->...j", s["W_w"], flat))
        o = s.drop(s.F(h))
        R = torch.stack([R[..., j, :] + weights[..., j : j + 1] * o for j in range(n)], -2)
    return gated_read(P, "last_read.", R, n)[1]
