"""Mixture of experts in place of an FFN: a softmax router sends every token to its top k experts (OLMoE,
arXiv 2409.02060). Dropless: no expert has a capacity, so no token ever loses one of its k.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from typing import Literal, NamedTuple, get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from siamesenorm.layers.grouped import add_slots, grouped_linear, sort_slots
from siamesenorm.layers.kernels import decode
from siamesenorm.layers.mlp import GATED, Activation, activate
from siamesenorm.residual.base import WeightRole
from siamesenorm.residual.hooks import has_hooks
from siamesenorm.residual.norms import NormFactory
from siamesenorm.residual.precision import widened, without_autocast


class RouterStats(NamedTuple):
    """What one MoE layer reports about a batch; the first two carry gradients and wait for the caller's weight."""

    balance_loss: Tensor
    """E · Σ_e f_e · p_e, f_e the share of all slots that expert e received and p_e its mean probability
    (arXiv 2101.03961): 1 where both are uniform, E/k where every token goes to the same k experts. OLMoE weighs it .01.
    f sums to 1; implementations that let it sum to k report k times as much. Where several processes train on parts
    of one batch, f is that of all parts together, so that the mean over processes is what one process would have."""
    z_loss: Tensor
    """Mean of logsumexp(router logits)² (arXiv 2202.08906). OLMoE weighs it .001."""
    tokens_per_expert: Tensor
    """(experts,) counts, whole numbers that sum to tokens · k."""
    router_entropy: Tensor
    """Mean entropy of the router's distribution in nats, ln(experts) at most."""


ExpertsRunner = Callable[["MoE", Tensor, Tensor, Tensor], Tensor]
"""(MoE, tokens, weights and indices of the chosen experts) to what these make of the tokens."""
Mean = Callable[[Tensor], Tensor]
"""The mean of a tensor over everybody who computes a part of the same batch."""


def run_experts(moe: MoE, tokens: Tensor, weights: Tensor, chosen: Tensor) -> Tensor:
    """All experts are here; where every process has some of them there is another way (expert parallelism)."""
    dtype = compute_dtype(tokens)
    slots, order = sort_slots(chosen, moe.experts)
    # The weight goes on the hidden units: an expert's output is then neither kept nor read again for it.
    weight = weights.flatten().index_select(0, order).unsqueeze(1)
    inner = grouped_linear(tokens, moe.w_in, moe.b_in, slots, dispatch=True, dtype=dtype)
    inner = moe.activate(inner, weight)
    out = add_slots(grouped_linear(inner, moe.w_out, None, slots, dispatch=False, dtype=dtype), slots)
    if moe.b_out is not None:
        spread = weights.new_zeros(weights.shape[0], moe.experts).scatter(1, chosen, weights)
        out = out + (spread @ moe.b_out.to(weights.dtype)).to(out.dtype)
    return out


class Router(nn.Linear):
    """Tokens to logits of the experts, in float32 (float64 for float64 input), also under autocast."""

    def forward(self, input: Tensor) -> Tensor:
        """(tokens, dim) to (tokens, experts)."""
        with without_autocast(input):
            wide = widened(input)
            return F.linear(wide, self.weight.to(wide.dtype))


class MoE(nn.Module):
    """dim → top k of `experts` FFNs of width `hidden` → dim; returns its output and `RouterStats`.

    ::

        moe = MoE(dim=256, hidden=512, experts=16, top_k=2)
        out, stats = moe(h)                                              # h: (..., 256)
        loss = task_loss + .01 * stats.balance_loss + .001 * stats.z_loss

    An expert is ``W_out act(W_in h)``, its output weighted by the router's probability. Weights of all experts are
    stacked, each in `nn.Linear`'s (out, in) order; SwiGLU's value and gate are the first and second half of W_in's
    rows. The router runs in float32 (float64 for float64 input), also under autocast.

    `normalize_top_k` divides the k weights of a token by their sum; OLMoE does not.
    `output_norm` makes a norm of width `hidden`, shared by the experts, before W_out (Sub-LN).
    """

    def __init__(
        self,
        dim: int,
        hidden: int,
        experts: int,
        top_k: int,
        *,
        activation: Activation = "swiglu",
        bias: bool = False,
        normalize_top_k: bool = False,
        output_norm: NormFactory | None = None,
    ) -> None:
        super().__init__()
        for name, value in (("dim", dim), ("hidden", hidden), ("experts", experts)):
            if value < 1:
                raise ValueError(f"MoE: {name} = {value} is not allowed; it takes a whole number from 1")
        if not 1 <= top_k <= experts:
            raise ValueError(f"MoE: top_k = {top_k} is not allowed; it takes a number from 1 to experts = {experts}")
        if activation not in get_args(Activation):
            known = ", ".join(get_args(Activation))
            raise ValueError(f"MoE: unknown activation {activation!r}; known activations: {known}")
        self.dim, self.hidden, self.experts, self.top_k = dim, hidden, experts, top_k
        self.activation, self.normalize_top_k = activation, normalize_top_k
        inner = 2 * hidden if activation in GATED else hidden
        self.router = Router(dim, experts, bias=False)
        self.w_in = nn.Parameter(torch.empty(experts, inner, dim))
        self.w_out = nn.Parameter(torch.empty(experts, dim, hidden))
        self.b_in = nn.Parameter(torch.empty(experts, inner)) if bias else None
        self.b_out = nn.Parameter(torch.empty(experts, dim)) if bias else None
        self.out_norm = output_norm(hidden) if output_norm is not None else None
        self.run_experts: ExpertsRunner = run_experts
        self.mean: Mean | None = None
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Every weight normal with std 1/sqrt(fan in), biases 0; models with a rule of their own draw again."""
        for _, weight in self.role_weights():
            nn.init.normal_(weight, std=1 / math.sqrt(weight.shape[-1]))
        for bias in (self.b_in, self.b_out):
            if bias is not None:
                nn.init.zeros_(bias)

    def role_weights(self) -> Iterator[tuple[WeightRole | Literal["router"], Tensor]]:
        """Weights by the role that init rules speak of; the last dimension is the fan in."""
        yield "router", self.router.weight
        yield "ffn_in", self.w_in
        yield "ffn_out", self.w_out

    def hidden_matrices(self) -> dict[str, int]:
        """Weights by name, and the rows of one matrix in each: every expert's value, gate and output."""
        return {"w_in": self.hidden, "w_out": self.dim}

    def width_sums(self) -> set[str]:
        """What sums over the stack's width beside those."""
        return {"router.weight"}

    def forward(self, h: Tensor) -> tuple[Tensor, RouterStats]:
        """(..., dim) to the same, and what the router did."""
        tokens = h.reshape(-1, self.dim)
        if not torch.is_grad_enabled() and (few := self._few_tokens(tokens)) is not None:
            return few[0].view(h.shape), few[1]
        logits, log_p, weights, chosen = self.route(tokens)
        out = self.run_experts(self, tokens, weights, chosen)
        return out.view(h.shape), self._report(logits, log_p, chosen)

    def route(self, tokens: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Logits and log-probabilities, (tokens, experts); weights and indices of the chosen experts, (tokens, k)."""
        logits = self.router(tokens)
        with without_autocast(tokens):
            log_p = logits.log_softmax(-1)
            weights, chosen = log_p.topk(self.top_k, dim=-1)
            weights = weights.exp()
            if self.normalize_top_k:
                weights = weights / weights.sum(-1, keepdim=True)
        return logits, log_p, weights, chosen

    def _few_tokens(self, tokens: Tensor) -> tuple[Tensor, RouterStats] | None:
        """Decoding: on CPU, all of `forward` in one compiled step, where that exists."""
        if self.activation != "swiglu" or self.out_norm is not None or self.run_experts is not run_experts:
            return None
        if type(self.router) is not Router or has_hooks(self.router):
            return None
        weights = (self.router.weight, self.w_in, self.b_in, self.w_out, self.b_out)
        few = decode.experts(tokens, self.top_k, self.normalize_top_k, *weights)
        if few is None:
            return None
        out, stats, counts = few
        balance, z, entropy = stats.unbind()
        return out, RouterStats(balance, z, counts, entropy)

    def activate(self, inner: Tensor, weight: Tensor) -> Tensor:
        """The hidden units of every slot, times the slot's weight."""
        units = activate(inner, self.activation)
        if self.out_norm is not None:
            units = self.out_norm(units)
        return (units * weight).to(inner.dtype)

    def _report(self, logits: Tensor, log_p: Tensor, chosen: Tensor) -> RouterStats:
        choices = chosen.flatten()
        counts = choices.new_zeros(self.experts).scatter_add_(0, choices, torch.ones_like(choices))
        tokens = max(logits.shape[0], 1)
        with without_autocast(logits):
            p = log_p.exp()
            slots = counts.to(p.dtype)
            if self.mean is not None and self.training:
                shared = self.mean(torch.cat([slots, slots.new_full((1,), tokens)]))
                slots = shared[:-1] * (tokens / shared[-1])  # of all, as many as there are tokens here
            balance = p.sum(0).dot(slots) * (self.experts / (tokens * tokens * self.top_k))
            log_total = logits[:, 0] - log_p[:, 0]  # logsumexp, which log_softmax has computed already
            z = log_total.dot(log_total) / tokens
            entropy = p.detach().flatten().dot(log_p.detach().flatten()) / -tokens
        return RouterStats(balance, z, counts, entropy)

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return f"{self.dim}, hidden={self.hidden}, experts={self.experts}, top_k={self.top_k}, {self.activation}"


def compute_dtype(x: Tensor) -> torch.dtype:
    """What autocast wants matrix products in, else the input's own."""
    kind = x.device.type
    if x.dtype != torch.float64 and kind != "meta" and torch.is_autocast_enabled(kind):
        return torch.get_autocast_dtype(kind)
    return x.dtype
