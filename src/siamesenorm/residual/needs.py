"""What a topology asks of sublayers that the user writes: on offer here, with a warning until it is taken.

Two things lie inside sublayers, where a topology cannot reach: norms on queries, keys and values or before output
projections, and first weights. Without them the name stays and the method is gone, so a stack says so when it runs.
"""

from __future__ import annotations

import sys
import warnings
from collections import Counter
from collections.abc import Callable, Iterable
from typing import TYPE_CHECKING, Any, ClassVar, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from siamesenorm.errors import TopologyError, UnmetNeedsWarning, shown
from siamesenorm.residual.places import Place
from siamesenorm.residual.ramp import ramps_of

if TYPE_CHECKING:
    from siamesenorm.residual.base import AttentionNorm, InitRule, SublayerNeeds
    from siamesenorm.residual.norms import NormFactory, Norms

M = TypeVar("M", bound=nn.Module)
NeedsState = Literal["check", "met", "waived"]
ATTENTION_ROLES = ("query", "key", "value", "attention_out")
FFN_ROLES = ("ffn_in", "ffn_out")
ROLES = {"ffn": FFN_ROLES, "parallel": ATTENTION_ROLES + FFN_ROLES}
OURS = (__name__.partition(".")[0], "torch")
NORMS_IN_WORDS = {
    "qk_head": "a norm per head on queries and keys",
    "qk_projection": "a norm over all queries and one over all keys",
    "qkv_head": "a norm per head on queries, keys and values",
}


class AttentionNorms(nn.Module):
    """The norms that a topology wants inside one attention, behind one call; where it wants none, nothing happens.

    ::

        q, k, v = norms(q, k, v)      # each (..., heads, head_dim), before rotary positions
    """

    def __init__(
        self,
        kind: AttentionNorm,
        norm: NormFactory,
        head_dim: int,
        heads: int,
        kv_heads: int,
        needs: SublayerNeeds | None = None,
    ) -> None:
        super().__init__()
        self.kind = kind
        whole = kind == "qk_projection"
        q, k, v = (norm if needs is None else needs.inner(name, norm) for name in "qkv")
        self.q = None if kind == "none" else q(heads * head_dim if whole else head_dim)
        self.k = None if kind == "none" else k(kv_heads * head_dim if whole else head_dim)
        self.v = v(head_dim) if kind == "qkv_head" else None

    def forward(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values, normed where the topology asks for it."""
        return self._normed(q, self.q), self._normed(k, self.k), self._normed(v, self.v)

    def _normed(self, heads: Tensor, norm: nn.Module | None) -> Tensor:
        if norm is None:
            return heads
        normed: Tensor = norm(heads.flatten(-2)) if self.kind == "qk_projection" else norm(heads)
        return normed.view_as(heads)

    def extra_repr(self) -> str:
        """Shown by print(model)."""
        return self.kind


class NeedsOnOffer:
    """The side of a topology that people meet who put it into a model of their own."""

    name: ClassVar[str]
    places: list[Place]
    norms: Norms
    open_needs: set[tuple[str, int]]
    """What nobody took yet: the method that has it on offer, and the sublayer."""
    lent: list[nn.Module]
    """What sublayers took that changes with the step; they own it."""

    def needs(self, place: Place) -> SublayerNeeds:
        """The norms that this topology wants inside the sublayer at `place`."""
        raise NotImplementedError

    @property
    def init_rule(self) -> InitRule:
        """What this topology changes about weight initialisation."""
        raise NotImplementedError

    def open_all_needs(self, state: NeedsState) -> None:
        """Note what is needed where, unless it is said to be met elsewhere, or waived."""
        if state not in get_args(NeedsState):
            raise TopologyError.not_allowed(f"{self.name}: needs =", state, "check, met or waived")
        self.open_needs, self.lent = set(), []
        has_rule = not self.init_rule.is_neutral
        for place in self.places if state == "check" else []:
            needs = self.needs(place)
            wanted = {
                "attention_norms": needs.attention_norm != "none",
                "inner_norm": needs.output_norm,
                "init_weights_": has_rule,
            }
            self.open_needs |= {(offer, place.index) for offer, is_wanted in wanted.items() if is_wanted}

    def attention_norms(self, place: Place, head_dim: int, heads: int, kv_heads: int | None = None) -> AttentionNorms:
        """The norms that this topology wants inside the attention at `place`; to be kept in that attention."""
        for name, value in (("head_dim", head_dim), ("heads", heads), ("kv_heads", kv_heads or heads)):
            if not isinstance(value, int) or isinstance(value, bool) or value < 1:
                raise TopologyError.not_allowed(f"{self.name}: {name} =", value, "a whole number from 1")
        needs = self._needs_of(place)
        self.open_needs.discard(("attention_norms", place.index))
        kind = needs.attention_norm
        return self._lend(AttentionNorms(kind, self.norms.inside, head_dim, heads, kv_heads or heads, needs))

    def inner_norm(self, place: Place, width: int) -> nn.Module:
        """The norm that this topology wants before the output projection at `place`, or an identity."""
        needs = self._needs_of(place)
        self.open_needs.discard(("inner_norm", place.index))
        return self._lend(needs.inner("out", self.norms.inside)(width)) if needs.output_norm else nn.Identity()

    def _lend(self, module: M) -> M:
        """Remember what a sublayer has taken, where it changes with the step."""
        if ramps_of(module):
            self.lent.append(module)
        return module

    @torch.no_grad()
    def init_weights_(self, place: Place, draw: Callable[[Tensor], Any], **weights: Tensor | Iterable[Tensor]) -> None:
        """First values of the weights at `place`: what `draw` gives, by this topology's rule.

        ::

            residual.init_weights_(place, nn.init.xavier_normal_, value=v.weight, attention_out=out.weight)

        draw: fills a weight in place, as the functions of `torch.nn.init` do, without a depth factor where
        ``init_rule.keeps_depth_factor`` is false. Where a topology's authors fix one std it is taken instead.
        weights: by role, a tensor or several: query, key, value, attention_out, ffn_in, ffn_out. Slices of a fused
        matrix will do.
        """
        self._needs_of(place)
        rule, roles = self.init_rule, ROLES.get(place.kind, ATTENTION_ROLES)
        for role in weights:
            if role not in roles:
                raise TopologyError(
                    f"{self.name}: {shown(role)} is no weight of {place.kind}; it has {', '.join(roles)}"
                )
        wanted = [role for role in roles if rule.std is not None or role in rule.scale]
        if missing := [role for role in wanted if role not in weights]:
            raise TopologyError(f"{self.name}: of {place.kind}, these weights are missing: {', '.join(missing)}")
        given = [(role, w) for role, ws in weights.items() for w in ([ws] if isinstance(ws, Tensor) else ws)]
        for role, weight in given:
            draw(weight) if rule.std is None else weight.normal_(0, rule.std)
            weight.mul_(rule.scale.get(role, 1.0))  # type: ignore[call-overload]  # checked to be a role
        if not any(weight.is_meta for _, weight in given):  # those have no values yet
            self.open_needs.discard(("init_weights_", place.index))

    def check_needs(self) -> None:
        """Warn, once, of what nobody took; every pass through the stack asks this when it begins."""
        if self.open_needs:
            kinds = {self.needs(place).attention_norm for place in self.places}
            words = {
                "attention_norms": " and ".join(NORMS_IN_WORDS[kind] for kind in sorted(kinds - {"none"})),
                "inner_norm": "a norm before the output projection",
                "init_weights_": "first weights by its rule",
            }
            counts = Counter(offer for offer, _ in self.open_needs)
            missing = [f"{words[offer]} (residual.{offer}) in {counts[offer]}" for offer in words if counts[offer]]
            warn(
                f"{self.name} wants {', '.join(missing)} of {len(self.places)} sublayers; take them from there, or "
                "say Residual(..., needs='met') where your own code has them, or needs='waived' to go without"
            )
            self.open_needs = set()  # said; where warnings are errors it is not reached, and said again

    def _needs_of(self, place: Place) -> SublayerNeeds:
        if place not in self.places:
            raise TopologyError(f"{self.name}: {shown(place)} is not in this stack; it takes one of residual.places")
        return self.needs(place)


def warn(text: str) -> None:
    """Warn at the line outside of this library and of torch that led here."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] in OURS:
        level, frame = level + 1, frame.f_back
    warnings.warn(text, UnmetNeedsWarning, stacklevel=level)


# A compiler runs it while it traces, without a graph break: torch.compiler.assume_constant_result, less its imports.
warn._dynamo_marked_constant = True  # type: ignore[attr-defined]
