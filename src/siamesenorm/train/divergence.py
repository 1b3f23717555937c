"""When a run has diverged: a loss that is no number, a spike, or a plateau where nothing is learnt of the input.

The monitor sees every loss and gradient norm before the optimiser's step. Its verdicts depend on nothing else, so
that all processes come to the same one, and a resumed run to the same as one that was never stopped.
"""

from __future__ import annotations

import math
import statistics
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from siamesenorm.train.config import DivergenceConfig
from siamesenorm.train.distributed import World
from siamesenorm.train.tensor_layout import local, plain_name

Kind = Literal["non_finite", "spike", "plateau"]
Action = Literal["go_on", "skip", "rollback", "stop"]
LEARNT = 0.02
"""Nats that a run must gain from one half of the plateau's window to the other to count as learning."""


@dataclass(frozen=True)
class Verdict:
    """What is wrong with a step."""

    kind: Kind
    message: str


class DivergenceMonitor:
    """Watches the losses of a run.

    warmup: plateaus are not looked for before.
    chance_loss, about: the loss of a model that has learnt nothing of its input, None if unknown; what it is.
    """

    def __init__(
        self,
        config: DivergenceConfig,
        warmup: int,
        chance_loss: float | None,
        about: str = "what knowing nothing gives",
    ) -> None:
        self.config, self.warmup, self.chance_loss, self.about = config, warmup, chance_loss, about
        self.losses: deque[float] = deque(maxlen=4 * config.history)
        self.levels: deque[float] = deque(maxlen=4 * config.history)
        """What plateaus are looked for in: the losses, or the part of them that `chance_loss` is a level of."""
        self.spikes = self.skipped = self.rollbacks = 0

    def judge(self, step: int, loss: float, grad_norm: float) -> Verdict | None:
        """What is wrong with this step, before it is taken."""
        if not math.isfinite(loss):
            return Verdict("non_finite", f"the loss is {loss}")
        if not math.isfinite(grad_norm):
            return Verdict("non_finite", f"the gradient norm is {grad_norm}")
        recent = list(self.losses)[-self.config.history :]
        if self.config.spike is not None and len(recent) >= min(self.config.history, 10):
            median = statistics.median(recent)
            if loss > median + self.config.spike:
                return Verdict("spike", f"the loss is {loss:.3f}, after a median of {median:.3f}")
        return self._plateau(step)

    def _plateau(self, step: int) -> Verdict | None:
        length = 4 * self.config.history
        if self.config.plateau is None or self.chance_loss is None or len(self.levels) < length:
            return None
        if step <= self.warmup + length:
            return None
        levels = list(self.levels)
        before, recent = statistics.fmean(levels[: length // 2]), statistics.fmean(levels[length // 2 :])
        if recent < self.chance_loss - self.config.plateau or before - recent > LEARNT:
            return None
        return Verdict("plateau", f"the loss stays at {recent:.3f}, and {self.chance_loss:.3f} is {self.about}")

    def act(self, verdict: Verdict) -> Action:
        """What the policy does about a verdict; counts the attempts."""
        policy = self.config.policy
        if verdict.kind == "plateau":
            return "stop"  # other data or one step less would not help
        if verdict.kind == "spike":
            self.spikes += 1
            if policy != "skip" and self.spikes < self.config.spike_steps:
                return "go_on"
        if policy == "skip":
            self.skipped += 1
            return "skip" if self.skipped <= self.config.attempts else "stop"
        if policy == "rollback":
            self.rollbacks += 1
            return "rollback" if self.rollbacks <= self.config.attempts else "stop"
        return "stop"

    def accept(self, loss: float, verdict: Verdict | None, level: float | None = None) -> None:
        """The step is taken; level: the part of its loss in which plateaus are looked for, if not all of it."""
        if verdict is None:
            self.losses.append(loss)  # a spike would lift the median that the next one is measured by
            self.levels.append(loss if level is None else level)
            self.spikes = 0
        self.skipped = 0

    def state(self) -> dict[str, Any]:
        """Everything that later verdicts depend on."""
        return {
            "losses": list(self.losses),
            "levels": list(self.levels),
            "spikes": self.spikes,
            "skipped": self.skipped,
            "rollbacks": self.rollbacks,
        }

    def load(self, state: dict[str, Any]) -> None:
        """Go on from a saved state."""
        self.losses = deque(state.get("losses", ()), maxlen=self.losses.maxlen)
        self.levels = deque(state.get("levels", self.losses), maxlen=self.levels.maxlen)
        self.spikes, self.skipped = int(state.get("spikes", 0)), int(state.get("skipped", 0))
        self.rollbacks = int(state.get("rollbacks", 0))


@torch.no_grad()
def largest_gradient(model: nn.Module) -> Tensor:
    """Which of the parameters has the largest gradient, of what this process holds: a number on the device."""
    parameters = list(model.parameters())
    grads = [None if p.grad is None else local(p.grad) for p in parameters]
    norms = iter(torch._foreach_norm([grad for grad in grads if grad is not None]))
    none = local(parameters[0]).new_full((), -1.0, dtype=torch.float32)
    return torch.stack([none if grad is None else next(norms).to(none) for grad in grads]).argmax()


def locate(
    model: nn.Module,
    verdict: Verdict,
    again: Callable[[], object],
    world: World | None = None,
    largest: int | None = None,
) -> str | None:
    """The layer where it began: the first activation that is no number, a parameter, or the gradient nearest the loss.

    again: computes loss and gradients of the step's data once more. Of a spike, the parameter with the largest
    gradient is named: `largest`, or that of the gradients that are there. All processes call this and get the same:
    each sees its own part of weights and data only, and a step is computed again by all of them or by none.
    """
    world = world or World()

    def agreed(found: str | None) -> str | None:
        return next(filter(None, world.gather(found)), None)

    if verdict.kind == "plateau":
        return None
    parameters = [(plain_name(name), parameter) for name, parameter in model.named_parameters()]
    if verdict.kind == "spike":
        name, parameter = parameters[int(largest_gradient(model)) if largest is None else largest]
        size = 0.0 if parameter.grad is None else float(local(parameter.grad).norm())
        return f"largest gradient: {max(world.gather((size, name)), key=lambda found: found[0])[1]}"
    broken = agreed(next((name for name, parameter in parameters if not _finite(parameter)), None))
    if broken is not None:
        return f"parameter {broken}"
    activation = agreed(first_activation(model, again))
    if activation is not None:
        return f"activation of {activation}"
    gradient = agreed(next((n for n, p in reversed(parameters) if p.grad is not None and not _finite(p.grad)), None))
    return None if gradient is None else f"gradient of {gradient}"


def first_activation(model: nn.Module, again: Callable[[], object]) -> str | None:
    """The module whose output is the first that is no number while the step is computed."""
    found: list[str] = []

    def watch(name: str) -> Callable[[nn.Module, Any, Any], None]:
        def look(module: nn.Module, inputs: Any, output: Any) -> None:
            first = output[0] if isinstance(output, tuple) and output else output
            if not found and isinstance(first, Tensor) and first.is_floating_point() and not _finite(first):
                found.append(name)

        return look

    hooks = [module.register_forward_hook(watch(plain_name(name))) for name, module in model.named_modules() if name]
    try:
        again()
    finally:
        for hook in hooks:
            hook.remove()
    return found[0] if found else None


def _finite(tensor: Tensor) -> bool:
    return bool(torch.isfinite(local(tensor.detach())).all())
