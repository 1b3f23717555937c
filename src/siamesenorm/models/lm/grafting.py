"""A Pre-Norm language model in another topology, with the same function; and a certificate that it is the same."""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from siamesenorm.errors import NotExact
from siamesenorm.models.lm.config import LMConfig
from siamesenorm.models.lm.model import LanguageModel
from siamesenorm.residual import Residual, TopologyError
from siamesenorm.residual.grafts import compute_pre_norm, embedding_factor, eps_for, graft_text


def graft(model: LanguageModel, topology: str) -> LanguageModel:
    """The same function in another topology; raises `TopologyError` where no exact setting is known.

    The model must be Pre-Norm. Its weights are copied, the topology's own parameters set so that nothing changes.
    """
    return graft_exactly(model, topology)[0]


def graft_config(config: LMConfig, topology: str) -> LMConfig:
    """The configuration that `graft` gives a model of this one."""
    if config.topology != "pre":
        raise TopologyError(f"graft: the source's topology {config.topology!r} is not allowed; it takes a model of pre")
    topology = graft_text(topology)
    wanted = Residual(topology, config.dim, config.blocks, needs="waived", device="meta")  # or says why not
    if wanted.options.prores:
        raise TopologyError("graft: prores is not allowed; training would begin with branches of size 0")
    changed = {"topology": topology, "embedding_scale": config.embedding_scale * embedding_factor(wanted)}
    if config.qk_norm == "none":  # norms inside sublayers have the same eps, and stay as they are
        changed["norm_eps"] = eps_for(wanted, config.norm_eps)
    return LMConfig.model_validate({**config.model_dump(), **changed})


@torch.no_grad()
def graft_exactly(model: LanguageModel, topology: str) -> tuple[LanguageModel, dict[str, str]]:
    """`graft`, and the parameters that go on as one of the source's: their names, each with the name there."""
    grafted = LanguageModel(graft_config(model.config, topology), seed=0)
    factor = embedding_factor(grafted.residual)
    for place in grafted.residual.places:
        ours, theirs = (m.residual.needs(place) for m in (grafted, model))
        if ours != theirs:
            raise NotExact(f"graft: {topology} wants norms inside sublayers that the source does not have")
    grafted = grafted.to(model.embedding.weight)
    own, new = dict(grafted.named_parameters()), grafted.residual_parameters()
    source = dict(model.named_parameters())
    carried = {name: name for name in source if name in own and name not in new}
    for name in carried:
        own[name].copy_(source[name])
    if grafted.positions is not None:
        grafted.positions.weight.mul_(factor)
    norms: list[Any] = [link.norm for link in model.residual.links]
    assert model.residual.final_norm is not None
    same = compute_pre_norm(grafted.residual, norms, model.residual.final_norm)
    names = {parameter: name for name, parameter in source.items()}
    carried |= {name: names[same[parameter]] for name, parameter in own.items() if parameter in same}
    return grafted.train(model.training), carried


@dataclass(frozen=True)
class Agreement:
    """How far two models say the same about a text."""

    tokens: int
    largest_kl: float
    """Of any token's prediction, in nats."""
    mean_kl: float
    top1_agreement: float
    """Share of tokens whose likeliest next token is the same."""
    perplexity_before: float
    perplexity_after: float


@torch.no_grad()
def compare_predictions(before: LanguageModel, after: LanguageModel, ids: Tensor) -> Agreement:
    """Both models' predictions of every token of (rows, tokens), in float64 behind the logits."""
    largest, total, same, losses, count = 0.0, 0.0, 0, [0.0, 0.0], 0
    for row in ids.split(1):
        logs = [m(row).logits[0].double().log_softmax(-1) for m in (before, after)]
        kl = (logs[0].exp() * (logs[0] - logs[1])).sum(-1).clamp(min=0)
        kl = kl.nan_to_num(nan=math.inf)  # no number is no match
        largest, total = max(largest, kl.max().item()), total + kl.sum().item()
        same += int((logs[0].argmax(-1) == logs[1].argmax(-1)).sum())
        for number, log in enumerate(logs):
            losses[number] += F.nll_loss(log[:-1], row[0, 1:], reduction="sum").item()
        count += row.shape[1]
    scored = max(count - len(ids), 1)
    return Agreement(count, largest, total / count, same / count, *(math.exp(loss / scored) for loss in losses))


def certify(before: LanguageModel, after: LanguageModel, ids: Tensor, *, low_precision: int = 256) -> dict[str, Any]:
    """A certificate of a graft, by precision: fp32 on all of a text, bf16 on its first tokens."""
    before, after = (copy.deepcopy(m).float().eval() for m in (before, after))
    found = {"fp32": asdict(compare_predictions(before, after, ids))}
    before, after = before.to(torch.bfloat16), after.to(torch.bfloat16)
    found["bf16"] = asdict(compare_predictions(before, after, ids[:1, :low_precision]))
    return found
