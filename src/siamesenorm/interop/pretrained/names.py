"""Where every tensor of another's model lies in ours, read both ways: to import it, and to export ours as theirs.

Queries, keys and values are one matrix in ours, value and gate too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from siamesenorm.errors import InteropError
from siamesenorm.interop.pretrained.architectures import Architecture
from siamesenorm.models.lm import LMConfig

IGNORED = ("rotary_emb.inv_freq", "attention.bias", "attention.masked_bias", "attn.bias", "attn.masked_bias")
"""Ends of names of tensors that older files hold and no model needs."""


@dataclass(frozen=True)
class Change:
    """What is done to their tensor to make ours, and what undoes it."""

    there: Callable[[Tensor], Tensor]
    back: Callable[[Tensor], Tensor]


PLUS_ONE = Change(lambda gain: gain.float() + 1, lambda gain: gain.float() - 1)
"""Of a gain that is stored less one."""
TRANSPOSED = Change(torch.t, torch.t)


@dataclass(frozen=True)
class Target:
    """A place in one of our tensors."""

    name: str
    expert: int | None = None
    rows: slice | None = None
    change: Change | None = None

    @property
    def place(self) -> str:
        """The same for all names under which a tensor may come."""
        return f"{self.name} {self.expert} {self.rows}"

    def put(self, theirs: Tensor, source: str, state: dict[str, Tensor]) -> None:
        """Copy their tensor there."""
        place = self.within(state)
        if self.change is not None:
            theirs = self.change.there(theirs)
        if theirs.shape != place.shape:
            raise InteropError(
                f"source: {source} has shape {tuple(theirs.shape)}; its config.json asks for {tuple(place.shape)}"
            )
        place.copy_(theirs)

    def take(self, state: dict[str, Tensor]) -> Tensor:
        """Their tensor, from there."""
        place = self.within(state)
        return place if self.change is None else self.change.back(place)

    def within(self, state: dict[str, Tensor]) -> Tensor:
        """The place itself, a view."""
        place = state[self.name]
        place = place if self.expert is None else place[self.expert]
        return place if self.rows is None else place[self.rows]


Targets = dict[str, Target]


def targets_of(config: LMConfig, kind: Architecture, theirs: Any) -> Targets:
    """Their names of all tensors, and where each goes; theirs: their configuration."""
    return dict(MAKERS[kind.names](config, kind, theirs))


def llama(c: LMConfig, kind: Architecture, config: Any) -> Iterator[tuple[str, Target]]:
    """Llama's names, which most others have too; biases of ours that they have not stay zero."""
    gain = PLUS_ONE if kind.plus_one else None
    has_bias = c.bias if c.qkv_bias is None else c.qkv_bias
    yield "model.embed_tokens.weight", Target("embedding.weight")
    if not c.tied:
        yield "lm_head.weight", Target("head.weight")
    norms = dict(NORMS[kind.topology])
    if kind.qk_norm != "none":
        norms |= {f"self_attn.{part}_norm": f"attention.{part}_norm" for part in "qk"}
    if c.norm_affine:
        yield "model.norm.weight", Target("residual.final_norm.weight", change=gain)
    inner, inner_kv = c.heads * c.dim_per_head, c.num_kv_heads * c.dim_per_head
    parts = {
        "q": slice(0, inner),
        "k": slice(inner, inner + inner_kv),
        "v": slice(inner + inner_kv, inner + 2 * inner_kv),
    }
    for block in range(c.blocks):
        theirs, ours = f"model.layers.{block}.", f"blocks.{block}."
        for leaf in ("weight", "bias") if has_bias else ("weight",):
            for part, rows in parts.items():
                yield f"{theirs}self_attn.{part}_proj.{leaf}", Target(f"{ours}attention.qkv.{leaf}", rows=rows)
        for leaf in ("weight", "bias") if has_bias and not kind.qkv_bias else ("weight",):
            yield f"{theirs}self_attn.o_proj.{leaf}", Target(f"{ours}attention.out.{leaf}")
        if c.moe is not None:
            yield from experts(c, kind, theirs, ours)
        else:
            for leaf in ("weight", "bias") if getattr(config, "mlp_bias", False) else ("weight",):
                up = Target(f"{ours}ffn.up.{leaf}")
                yield f"{theirs}mlp.up_proj.{leaf}", replace(up, rows=slice(0, c.ffn_dim))
                yield f"{theirs}mlp.gate_proj.{leaf}", replace(up, rows=slice(c.ffn_dim, None))
                yield f"{theirs}mlp.down_proj.{leaf}", Target(f"{ours}ffn.down.{leaf}")
        if c.norm_affine:
            for name, place in norms.items():
                yield f"{theirs}{name}.weight", Target(f"{ours}{place}.weight", change=gain)


def experts(c: LMConfig, kind: Architecture, theirs: str, ours: str) -> Iterator[tuple[str, Target]]:
    """A mixture's, one by one, under Mixtral's names and the others', the kind's own first."""
    assert c.moe is not None
    hidden = c.moe.expert_dim
    for room in sorted(EXPERTS, key=lambda room: room != kind.experts):
        up, gate, down = EXPERTS[room]
        yield f"{theirs}{room}.gate.weight", Target(f"{ours}ffn.router.weight")
        for expert in range(c.moe.experts):
            inside, w_in = f"{theirs}{room}.experts.{expert}.", Target(f"{ours}ffn.w_in", expert)
            yield f"{inside}{up}.weight", replace(w_in, rows=slice(0, hidden))
            yield f"{inside}{gate}.weight", replace(w_in, rows=slice(hidden, None))
            yield f"{inside}{down}.weight", Target(f"{ours}ffn.w_out", expert)


EXPERTS = {"mlp": ("up_proj", "gate_proj", "down_proj"), "block_sparse_moe": ("w3", "w1", "w2")}

NORMS = {
    "pre": {"input_layernorm": "links.0.norm", "post_attention_layernorm": "links.1.norm"},
    "reordered": {"post_attention_layernorm": "links.0.norm", "post_feedforward_layernorm": "links.1.norm"},
    "sandwich": {
        "input_layernorm": "links.0.norm",
        "post_attention_layernorm": "links.0.output_norm",
        "pre_feedforward_layernorm": "links.1.norm",
        "post_feedforward_layernorm": "links.1.output_norm",
    },
}
"""Norms of a block under Llama's names, by topology."""


def gpt2(c: LMConfig, kind: Architecture, config: Any) -> Iterator[tuple[str, Target]]:
    """GPT-2's names; its matrices lie the other way round."""
    yield "transformer.wte.weight", Target("embedding.weight")
    yield "transformer.wpe.weight", Target("positions.weight")
    if not c.tied:
        yield "lm_head.weight", Target("head.weight")
    modules = {"attn.c_attn": "attention.qkv", "attn.c_proj": "attention.out"}
    modules |= {"mlp.c_fc": "ffn.up", "mlp.c_proj": "ffn.down"}
    norms = {"ln_1": "links.0.norm", "ln_2": "links.1.norm"}
    for leaf, change in (("weight", TRANSPOSED), ("bias", None)):
        yield f"transformer.ln_f.{leaf}", Target(f"residual.final_norm.{leaf}")
        for block in range(c.blocks):
            theirs, ours = f"transformer.h.{block}.", f"blocks.{block}."
            for name, place in modules.items():
                yield f"{theirs}{name}.{leaf}", Target(f"{ours}{place}.{leaf}", change=change)
            for name, place in norms.items():
                yield f"{theirs}{name}.{leaf}", Target(f"{ours}{place}.{leaf}")


def neox(c: LMConfig, kind: Architecture, config: Any) -> Iterator[tuple[str, Target]]:
    """GPT-NeoX's names; queries, keys and values lie head by head."""
    yield "gpt_neox.embed_in.weight", Target("embedding.weight")
    if not c.tied:
        yield "embed_out.weight", Target("head.weight")
    modules = {"attention.dense": "attention.out", "mlp.dense_h_to_4h": "ffn.up", "mlp.dense_4h_to_h": "ffn.down"}
    modules |= {"input_layernorm": "links.0.norm", "post_attention_layernorm": "links.1.norm"}
    fused = Change(partial(by_part, c=c), partial(by_head, c=c))
    for leaf in ("weight", "bias"):
        yield f"gpt_neox.final_layer_norm.{leaf}", Target(f"residual.final_norm.{leaf}")
        for block in range(c.blocks):
            theirs, ours = f"gpt_neox.layers.{block}.", f"blocks.{block}."
            yield f"{theirs}attention.query_key_value.{leaf}", Target(f"{ours}attention.qkv.{leaf}", change=fused)
            for name, place in modules.items():
                yield f"{theirs}{name}.{leaf}", Target(f"{ours}{place}.{leaf}")


MAKERS: dict[str, Callable[[LMConfig, Architecture, Any], Iterator[tuple[str, Target]]]] = {
    "llama": llama,
    "gpt2": gpt2,
    "neox": neox,
}


def by_part(fused: Tensor, c: LMConfig) -> Tensor:
    """Rows head by head (q, k, v of one head after the other) to all of q, all of k, all of v."""
    if fused.shape[0] != 3 * c.heads * c.dim_per_head:
        return fused  # its shape is refused
    q, k, v = fused.unflatten(0, (c.heads, 3, c.dim_per_head)).unbind(1)
    order = rotary_order(c)
    return torch.cat([q[:, order], k[:, order], v]).flatten(0, 1)


def by_head(ours: Tensor, c: LMConfig) -> Tensor:
    """What `by_part` began with."""
    q, k, v = ours.unflatten(0, (3, c.heads, c.dim_per_head))
    order = rotary_order(c).argsort()
    return torch.stack([q[:, order], k[:, order], v], dim=1).flatten(0, 2)


def rotary_order(c: LMConfig) -> Tensor:
    """Features of a head in the order of our rotary halves; those without rotation come behind each half."""
    rotated = c.dim_per_head if c.rotary_dim is None else c.rotary_dim
    first, second = torch.arange(rotated).chunk(2)
    rest = torch.arange(rotated, c.dim_per_head).chunk(2) if rotated < c.dim_per_head else (first[:0], first[:0])
    return torch.cat([first, rest[0], second, rest[1]])
