"""A Pre-Norm language model in any other topology: exactly where that can be, else stage by stage as near as it gets.

| stage      | what is done                                                                                      |
|------------|---------------------------------------------------------------------------------------------------|
| copied     | weights, and gains of norms that stand where norms stood                                          |
| calibrated | gains by least squares, on the source's activations                                               |
| regressed  | all new parameters by gradient, block by block                                                    |
| blended    | the source's function at first; the other topology comes in over so many steps of training        |

Of the first three the one with the smallest mean KL stays. `ids` are split: on one half of the rows gains are set, on
the other half the stages are judged.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from siamesenorm.errors import NotExact
from siamesenorm.models.lm.blending import blend, settle
from siamesenorm.models.lm.calibration import LAST, calibrate, regress
from siamesenorm.models.lm.grafting import Agreement, compare_predictions, graft_exactly
from siamesenorm.models.lm.model import LanguageModel
from siamesenorm.residual import TopologyError
from siamesenorm.residual.blend import SEPARATOR, Blend
from siamesenorm.residual.grafts import graft_text
from siamesenorm.residual.ramp import ramps_of

REGRESSED = 512
"""Tokens that blocks are regressed on: every step goes through all of them and back."""


@dataclass(frozen=True)
class Transplant:
    """A model in another topology, and how it came there."""

    model: LanguageModel
    carried: dict[str, str]
    """Parameters that go on as one of the source's: their names, each with the name there."""
    again: Callable[[LanguageModel], LanguageModel]
    """The same from other weights of the source, such as averaged ones; gains that were fitted stay."""
    stages: dict[str, Agreement] = field(default_factory=dict)
    """Agreement with the source behind every stage; empty where the graft is exact."""
    kept: str = "exact"
    """The stage that the other topology's parameters are of."""


def transplant(
    model: LanguageModel,
    topology: str,
    ids: Tensor,
    *,
    ramp: int | None = None,
    start: int = 0,
    qk_norm: str | None = None,
    regression: int = 10,
) -> Transplant:
    """A Pre-Norm model, or one that has blended to its end, in another topology.

    ids: rows of tokens to set gains by. ramp: steps of training over which the topology comes in, behind the first
    `start`; without it, or where the graft is exact, the topology stands alone at once. qk_norm: a norm on queries and
    keys that is new. regression: steps of gradient a block; 0 leaves that stage out.
    """
    if isinstance(model.residual, Blend):
        return _settled(model, topology)
    topology = graft_text(topology)
    if qk_norm in (None, model.config.qk_norm):
        try:
            grafted, carried = graft_exactly(model, topology)
        except NotExact:
            pass
        else:
            if ramp is not None:
                raise TopologyError.refused("--ramp", ramp, f"{topology} has the source's function at once")
            return Transplant(grafted, carried, lambda other: graft_exactly(other, topology)[0])
    steps = 1 if ramp is None else ramp

    def make(other: LanguageModel) -> tuple[LanguageModel, dict[str, str]]:
        return blend(other, topology, steps=steps, start=start, qk_norm=qk_norm)

    blended, carried = make(model)
    stages, kept = _stages(model, blended, ids, regression)

    def again(other: LanguageModel) -> LanguageModel:
        made = make(other)[0]
        own = dict(made.named_parameters())
        with torch.no_grad():
            for name, parameter in blended.named_parameters():
                if name not in carried:
                    own[name].copy_(parameter)
        return made if ramp is not None else settle(made)[0]

    blended.residual.set_step(start + 1)
    if ramp is not None:
        return Transplant(blended, carried, again, stages, kept)
    settled, names = settle(blended)
    return Transplant(
        settled, {n: carried[there] for n, there in names.items() if there in carried}, again, stages, kept
    )


def _stages(
    model: LanguageModel, blended: LanguageModel, ids: Tensor, regression: int
) -> tuple[dict[str, Agreement], str]:
    """Set the new parameters, stage by stage; the best stage's stay."""
    fitted, judged = (ids[::2], ids[1::2]) if len(ids) > 1 else (ids, ids)
    was = model.training
    model.eval()
    blended.eval()
    done: dict[str, Callable[[], None]] = {
        "copied": lambda: None,
        "calibrated": lambda: calibrate(blended, fitted),
        "regressed": lambda: regress(blended, model, fitted[: max(1, REGRESSED // ids.shape[1])], steps=regression),
    }
    if not regression:
        del done["regressed"]
    stages: dict[str, Agreement] = {}
    best: dict[str, Tensor] = {}
    kept = ""
    for name, act in done.items():
        act()
        blended.residual.set_step(LAST)
        stages[name] = compare_predictions(model, blended, judged)
        if not kept or stages[name].mean_kl < stages[kept].mean_kl:
            kept, best = name, {key: value.clone() for key, value in blended.state_dict().items()}
    blended.load_state_dict(best)
    model.train(was)
    blended.train(was)
    return stages, kept


def _settled(model: LanguageModel, topology: str) -> Transplant:
    """The end of a blend: the other topology alone."""
    residual = model.residual
    assert isinstance(residual, Blend)
    to = residual.options.to.replace(SEPARATOR, ",")
    if to not in (topology, graft_text(topology)):
        raise TopologyError.refused("--to", topology, f"the source has blended into {to!r}")
    b = min(float(ramp.value) for ramp in ramps_of(model))
    if b < 1:
        raise TopologyError(f"graft: the source has blended to b = {b:g} only; train it until b is 1")
    settled, carried = settle(model)
    return Transplant(settled, carried, lambda other: settle(other)[0])
