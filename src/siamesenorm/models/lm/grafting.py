"""A Pre-Norm language model in another topology, with the same function; and a certificate that it is the same."""

from __future__ import annotations

import copy
import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from siamesenorm.models.lm.config import LMConfig
from siamesenorm.models.lm.model import LanguageModel
from siamesenorm.residual import Residual, TopologyError
from siamesenorm.residual.grafts import compute_pre_norm


@torch.no_grad()
def graft(model: LanguageModel, topology: str) -> LanguageModel:
    """The same function in another topology; raises `TopologyError` where no exact setting is known.

    The model must be Pre-Norm. Its weights are copied, the topology's own parameters set so that nothing changes.
    """
    if model.config.topology != "pre":
        raise TopologyError(
            f"graft: the source's topology {model.config.topology!r} is not allowed; it takes a model of pre"
        )
    Residual(
        topology, model.config.dim, model.config.blocks, needs="waived", device="meta"
    )  # says what is wrong with it
    grafted = LanguageModel(LMConfig.model_validate({**model.config.model_dump(), "topology": topology}), seed=0)
    for place in grafted.residual.places:
        ours, theirs = (m.residual.needs(place) for m in (grafted, model))
        if ours != theirs:
            raise TopologyError(f"graft: {topology} wants norms inside sublayers that the source does not have")
    own, new = dict(grafted.named_parameters()), grafted.residual_parameters()
    for name, parameter in model.named_parameters():
        if name in own and name not in new:
            own[name].copy_(parameter)
    norms: list[Any] = [link.norm for link in model.residual.links]
    assert model.residual.final_norm is not None
    compute_pre_norm(grafted.residual, norms, model.residual.final_norm)
    return grafted.to(next(model.parameters()).dtype).train(model.training)


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
