"""First weights of a language model.

| weights             | mitchell (OLMo)                     | megatron     | normal |
|---------------------|-------------------------------------|--------------|--------|
| input projections   | 1/sqrt(fan_in)                      | s            | s      |
| output projections  | 1/sqrt(fan_in) · 1/sqrt(2(l+1))     | s · 1/sqrt(2L) | s    |
| embedding, head     | 1/sqrt(d)                           | s            | s      |
| drawn from          | normal cut at 3 std                 | normal       | normal |

l is the 0-based block, L the number of blocks, s = init_std; the second factor of output projections is the depth
factor. The topology's `InitRule` comes on top: one std for all where its authors fix it, a factor by role, and
whether the depth factor stays.

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

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from siamesenorm.layers.attention import RoleWeights
from siamesenorm.models.stack import Block
from siamesenorm.residual import Place

if TYPE_CHECKING:
    from siamesenorm.models.lm.config import LMConfig
    from siamesenorm.models.lm.model import LanguageModel

SPREAD = 0.3  # std of the first logits; the first loss is SPREAD²/2 above ln(vocabulary)
SELF_LOGIT = 2.0  # first logit of the token just read, at most; e² of 256 bytes adds .03 to the loss
OUTPUT_ROLES = ("attention_out", "ffn_out")


Around = Callable[[nn.Module], AbstractContextManager[object]]
"""What is done before and after a part of the model gets its values: the embedding, a block, the residual, the head."""


@torch.no_grad()
def init_lm(model: LanguageModel, seed: int | None = None, around: Around = nullcontext) -> None:
    """Give every parameter its first value. The draws do not depend on the topology, only their size does.

    around: may bring a part of a model on ``meta`` to life before, and take it apart behind; the values are the same.
    """
    there = model.embedding.weight.device
    device = torch.device("cpu") if there.type == "meta" else there
    generator = None if seed is None else torch.Generator(device).manual_seed(seed)
    init_stack(model, generator, around)
    if model.head is not None:
        with around(model.head):
            init_head(model, model.head.weight, generator)


@torch.no_grad()
def init_stack(model: LanguageModel, generator: torch.Generator | None = None, around: Around = nullcontext) -> None:
    """First values of all but an untied head."""
    config, rule = model.config, model.residual.init_rule
    embedding_std = rule.std or (config.dim**-0.5 if config.init == "mitchell" else config.init_std)
    smaller = config.tied and config.first_logits == "small"
    size = min(1.0, SELF_LOGIT / (output_parts(model) * embedding_std * config.dim)) if smaller else 1.0
    with around(model.embedding):
        draw(config, model.embedding.weight, embedding_std, generator)
        if output_norms(model) and not output_gains(model):
            model.embedding.weight.mul_(size)  # norms without gains leave only the matrix itself
    places = iter(model.residual.places)
    for block in model.blocks:
        with around(block):
            reset_constants(block)
            fill_output_gains(model, block, size)
            for sublayer in cast(Block, block).sublayers:
                place, role_weights = next(places), cast(Callable[[], RoleWeights], sublayer.role_weights)
                for role, weight in role_weights():
                    std = weight_std(config, place, role in OUTPUT_ROLES and rule.keeps_depth_factor, weight.shape[-1])
                    draw(config, weight, (rule.std or std) * rule.scale.get(role, 1.0), generator)
    with around(model.residual):
        reset_constants(model.residual)
        fill_output_gains(model, model.residual, size)


def fill_output_gains(model: LanguageModel, part: nn.Module, size: float) -> None:
    """Start the last gain(s), where they lie in this part of the model, at the output's size."""
    own = {id(parameter) for parameter in part.parameters()}
    for gain in output_gains(model) if size != 1 else ():
        if id(gain) in own:
            gain.fill_(size)


def reset_constants(part: nn.Module) -> None:
    """First values that are not drawn: of norms, links, biases, and what a topology holds itself."""
    for module in part.modules():
        if isinstance(module, nn.Linear) and module.bias is not None:
            nn.init.zeros_(module.bias)
        elif hasattr(module, "role_weights"):
            for parameter in module.parameters(recurse=False):
                nn.init.zeros_(parameter)  # biases of stacked experts; their weights are drawn
        elif not isinstance(module, (nn.Linear, nn.Embedding)):
            reset: Callable[[], None] = getattr(module, "reset_parameters", lambda: None)
            reset()


@torch.no_grad()
def init_head(model: LanguageModel, weight: Tensor, generator: torch.Generator | None = None) -> None:
    """First values of an untied head."""
    config = model.config
    std = config.dim**-0.5 if config.init == "mitchell" else config.init_std
    if config.first_logits == "small":
        std = min(std, SPREAD / (output_parts(model) * config.dim**0.5))
    else:
        std = model.residual.init_rule.std or std
    draw(config, weight, std, generator)


def draw(config: LMConfig, weight: Tensor, std: float, generator: torch.Generator | None) -> None:
    """Fill a weight from the initialiser's distribution; one without memory stays as it is."""
    if weight.is_meta:
        return
    weight.normal_(0, std, generator=generator)
    if config.init == "mitchell":
        redraw_beyond(weight, 3 * std, std, generator)


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


def weight_std(config: LMConfig, place: Place, depth_factor: bool, fan_in: int) -> float:
    """The initialiser's own std for one projection."""
    if config.init == "mitchell":
        return fan_in**-0.5 * ((2 * (place.block + 1)) ** -0.5 if depth_factor else 1.0)
    if config.init == "megatron":
        return config.init_std * ((2 * place.blocks) ** -0.5 if depth_factor else 1.0)
    return config.init_std


def output_norms(model: LanguageModel) -> list[nn.Module]:
    """The norms whose sum is the stack's output."""
    return list(model.residual.output_norms(model.residual.links[-1]))  # type: ignore[arg-type]


def output_gains(model: LanguageModel) -> list[Tensor]:
    """Gains of those norms, which decide the output's size."""
    return [norm.weight for norm in output_norms(model) if isinstance(norm.weight, Tensor)]


def output_parts(model: LanguageModel) -> int:
    """How many normalised streams the stack's output is the sum of; its rms is at most this."""
    return max(len(output_norms(model)), 1)
