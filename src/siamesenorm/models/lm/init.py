"""First weights of a language model.

| weights             | mitchell (OLMo)                     | megatron     | normal |
|---------------------|-------------------------------------|--------------|--------|
| input projections   | 1/sqrt(fan_in)                      | s            | s      |
| output projections  | 1/sqrt(fan_in) · 1/sqrt(2(l+1))     | s · 1/sqrt(2L) | s    |
| embedding, head     | 1/sqrt(d)                           | s            | s      |
| drawn from          | normal cut at 3 std                 | normal       | normal |

l is the 0-based block, L the number of blocks, s = init_std; the second factor of output projections is the depth
factor. The topology's `InitRule` comes on top.

That is all with ``first_logits = standard``, the published rules. ``first_logits = small`` is a rule of our own on top.

**The first loss** would best be ln(vocabulary): the model knows nothing and should say so. Two things work against it.

*Spread.* The stack's output has an rms of about 1, so that logits spread by std(head)·sqrt(d), and the loss starts
half the square of that too high. A small untied head therefore starts with std ``SPREAD/sqrt(d)`` at most, over the
number of norms whose sum the output is.

*Self-prediction.* With a tied head the logit of the token just read is ``g · h·e``, where e is its embedding with
|e| = s·sqrt(d), h the stack's output without its last gain and g that gain. Where the embedding is normalised on
its way (the X stream of siamese, Post-Norm and its kin), h is nearly e/|e|·sqrt(d) and the logit nearly g·s·d: 20
at d = 1024 and s = .02, against ln(vocabulary) = 9. No embedding std cures this, because the same matrix that must
be small as a head is wanted at its usual size in the residual stream, beside the sublayers' outputs. So the size
of the *output* starts lower: the last gain(s) begin at ``SELF_LOGIT/(s·d)`` instead of 1. It is a start value only:
the model's function has no new term, and every checkpoint loads with the gains it was trained to.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from siamesenorm.models.init import FirstWeights
from siamesenorm.models.lm.config import LMConfig
from siamesenorm.residual import Place

if TYPE_CHECKING:
    from siamesenorm.models.lm.model import LanguageModel

SPREAD = 0.3  # std of the first logits; the first loss is SPREAD²/2 above ln(vocabulary)
SELF_LOGIT = 2.0  # first logit of the token just read, at most; e² of 256 bytes adds .03 to the loss
OUTPUT_ROLES = ("attention_out", "ffn_out")


class LMFirstWeights(FirstWeights):
    """First weights of a language model."""

    model: LanguageModel
    config: LMConfig

    def embedding(self) -> None:
        """Smaller where norms without gains leave only the matrix itself to make tied logits small."""
        embedding = self.model.embedding
        with self.part(embedding):
            self.draw(embedding.weight, self.embedding_std)
            if self.output_norms and not self.output_gains:
                embedding.weight.mul_(self.output_size)
        if self.model.positions is not None:
            with self.part(self.model.positions):
                self.draw(self.model.positions.weight, self.embedding_std)

    def projection(self, weight: Tensor, place: Place, role: Any) -> None:
        """By fan in and depth (mitchell), by depth (megatron), or all alike."""
        fan_in, own, factor = weight.shape[-1], self.config.init_std * self.wide**-0.5, 1.0
        deep = role in OUTPUT_ROLES and self.rule.keeps_depth_factor
        if self.config.init == "mitchell":
            own, factor = fan_in**-0.5, (2 * (place.depth + 1)) ** -0.5
        elif self.config.init == "megatron":
            factor = (2 * self.base_depth) ** -0.5
        self.draw(weight, self.std(own * factor if deep else own, role))

    def head(self) -> None:
        """An untied one."""
        if self.model.head is not None:
            with self.part(self.model.head):
                self.head_weight(self.model.head.weight)

    @torch.no_grad()
    def head_weight(self, weight: Tensor) -> None:
        """The matrix of an untied head."""
        std = self.own_std
        if self.config.first_logits == "small":
            std = min(std, SPREAD / (self.output_parts * self.base_width**0.5))
        else:
            std = self.rule.std or std
        self.draw(weight, std)

    def constants(self, part: nn.Module) -> None:
        """The last gain(s), where they lie in this part of the model, start at the output's size."""
        super().constants(part)
        own = {id(parameter) for parameter in part.parameters()}
        for gain in self.output_gains if self.output_size != 1 else ():
            if id(gain) in own:
                gain.fill_(self.output_size)

    def draw(self, weight: Tensor, std: float) -> None:
        """From a normal distribution, which mitchell cuts at 3 std."""
        super().draw(weight, std)
        if self.config.init == "mitchell" and not weight.is_meta:
            redraw_beyond(weight, 3 * std, std, self.generator)

    @property
    def own_std(self) -> float:
        """The initialiser's own std for embedding and head."""
        return self.base_width**-0.5 if self.config.init == "mitchell" else self.config.init_std

    @property
    def embedding_std(self) -> float:
        """The embedding's, under the topology's rule."""
        return self.rule.std or self.own_std

    @property
    def output_size(self) -> float:
        """What the last gain(s) start at."""
        if not self.config.tied or self.config.first_logits != "small":
            return 1.0
        return min(1.0, SELF_LOGIT / (self.output_parts * self.embedding_std * self.base_width))

    @property
    def output_norms(self) -> list[nn.Module]:
        """The norms whose sum is the stack's output."""
        return list(self.model.residual.output_norms(self.model.residual.links[-1]))  # type: ignore[arg-type]

    @property
    def output_gains(self) -> list[Tensor]:
        """Gains of those norms, which decide the output's size."""
        return [norm.weight for norm in self.output_norms if isinstance(norm.weight, Tensor)]

    @property
    def output_parts(self) -> int:
        """How many normalised streams the stack's output is the sum of; its rms is at most this."""
        return max(len(self.output_norms), 1)


def redraw_beyond(weight: Tensor, limit: float, std: float, generator: torch.Generator | None) -> None:
    """Cut a normal draw at `limit`: draw again what lies beyond, eight times as fast as `nn.init.trunc_normal_`."""
    if type(weight) not in (Tensor, nn.Parameter):  # sharded tensors do not index by mask
        nn.init.trunc_normal_(weight, std=std, a=-limit, b=limit, generator=generator)
        return
    beyond = weight.abs() > limit
    while (count := int(beyond.sum())) > 0:
        weight[beyond] = torch.empty(count, dtype=weight.dtype, device=weight.device).normal_(
            0, std, generator=generator
        )
        beyond = weight.abs() > limit
