"""A small mixture of experts, and the same by definition: every expert on every token."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from siamesenorm.layers.moe import MoE

DIM, HIDDEN, EXPERTS, TOP_K = 8, 6, 5, 2


def make(seed: int = 0, dtype: torch.dtype = torch.float64, **options: object) -> MoE:
    torch.manual_seed(seed)
    shape = {"dim": DIM, "hidden": HIDDEN, "experts": EXPERTS, "top_k": TOP_K} | options
    moe = MoE(**shape).to(dtype)
    for bias in (moe.b_in, moe.b_out):
        if bias is not None:
            nn.init.normal_(bias)
    return moe


def batch(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float64) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, DIM, generator=generator, dtype=dtype, requires_grad=True)


def every_expert_on_every_token(moe: MoE, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Output, balance loss and z-loss from their definitions: all experts on all tokens, unchosen ones weighted 0."""
    tokens = h.reshape(-1, moe.dim)
    logits = tokens @ moe.router.weight.t()
    p = logits.exp() / logits.exp().sum(-1, keepdim=True)
    kept = p >= p.sort(-1, descending=True).values[:, moe.top_k - 1 : moe.top_k]
    weight = torch.where(kept, p, 0)
    if moe.normalize_top_k:
        weight = weight / weight.sum(-1, keepdim=True)
    out = torch.zeros_like(tokens)
    for e in range(moe.experts):
        inner = tokens @ moe.w_in[e].t() + (0 if moe.b_in is None else moe.b_in[e])
        if moe.activation == "swiglu":
            value, gate = inner[:, : moe.hidden], inner[:, moe.hidden :]
            units = gate * torch.sigmoid(gate) * value
        else:
            units = F.gelu(inner)
        units = units if moe.out_norm is None else moe.out_norm(units)
        out = out + weight[:, e : e + 1] * (units @ moe.w_out[e].t() + (0 if moe.b_out is None else moe.b_out[e]))
    balance = moe.experts * (kept.double().mean(0) / moe.top_k * p.mean(0)).sum()
    return out.view(h.shape), balance, logits.exp().sum(-1).log().square().mean()


def gradients(moe: MoE, h: Tensor, outputs: tuple[Tensor, ...]) -> list[Tensor]:
    weights = [torch.linspace(-1, 2, o.numel(), dtype=o.dtype).view(o.shape) + 0.3 for o in outputs]
    return list(torch.autograd.grad(outputs, [h, *moe.parameters()], weights))


def outputs(moe: MoE, h: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    out, stats = moe(h)
    return out, stats.balance_loss, stats.z_loss
