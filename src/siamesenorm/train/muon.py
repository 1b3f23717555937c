"""Muon (Jordan et al. 2024; arXiv 2502.16982): momentum whose singular values are all made about 1.

For every matrix W (rows × columns) with gradient G::

    B ← μ B + (1 - μ) G
    O = newton_schulz(μ B + (1 - μ) G)
    W ← (1 - lr · decay) W - lr · 0.2 · sqrt(max(rows, columns)) · O

The last factor gives O the root mean square of AdamW's updates, so that one learning rate and one decay serve both.
`torch.optim.Muon` with ``adjust_lr_fn="match_rms_adamw"`` has the same equations for parameters that are one matrix
each, whole in every process. Here a parameter may hold several matrices and may be sharded: momentum lies where the
parameter does, and its whole is gathered to be orthogonalised, one parameter at a time. Experts are not gathered: a
process orthogonalises those that it has.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from siamesenorm.train.tensor_layout import local, own_part, stored_rows, whole

COEFFICIENTS = (3.4445, -4.7750, 2.0315)
"""Of the quintic polynomial; torch's."""
ITERATIONS = 5
SMALLEST = 1e-7
"""Norm below which a matrix is not scaled up to 1."""
MATCHED_RMS = 0.2
"""Root mean square of AdamW's updates, about."""


class Fused(NamedTuple):
    """How matrices lie in a parameter."""

    rows: int
    """Of one matrix; the parameter's rows are a multiple."""
    order: Tensor | None = None
    """Row i of the parameter is row ``order[i]`` of the matrices, where that is not i."""


class Muon(torch.optim.Optimizer):
    """Muon for the matrices of some parameters and AdamW for all others, as one optimiser.

    hidden: groups that Muon takes, with ``"muon": True``; others: groups that `adamw` makes an optimiser of.
    fused: how matrices lie in each parameter of `hidden`.
    """

    def __init__(
        self,
        hidden: Sequence[dict[str, Any]],
        others: Sequence[dict[str, Any]],
        fused: Mapping[nn.Parameter, Fused],
        adamw: Callable[[Any], torch.optim.AdamW],
        *,
        lr: float,
        momentum: float,
    ) -> None:
        self.adamw = adamw(others) if others else None
        super().__init__([*(self.adamw.param_groups if self.adamw else ()), *hidden], {"lr": lr, "momentum": momentum})
        self.fused = dict(fused)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of both; none where `found_inf`, a number on the device, says that gradients are no numbers."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        found_inf: Tensor | None = getattr(self, "found_inf", None)
        if self.adamw is not None:
            self.adamw.param_groups = [group for group in self.param_groups if not group.get("muon")]
            self.adamw.state = self.state
            self.adamw.found_inf = found_inf  # type: ignore[attr-defined]
            self.adamw.step()
        for group in self.param_groups:
            if group.get("muon"):
                for parameter in group["params"]:
                    if parameter.grad is not None:
                        self._update(parameter, group, found_inf)
        return loss

    def _update(self, parameter: nn.Parameter, group: dict[str, Any], found_inf: Tensor | None) -> None:
        state = self.state[parameter]
        if "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, memory_format=torch.preserve_format)
        grad: Any = parameter.grad
        if isinstance(parameter, DTensor):
            grad = grad.redistribute(placements=parameter.placements)
        weight, mean, grad = local(parameter), local(state["momentum_buffer"]), local(grad)
        before = None if found_inf is None else (weight.clone(), mean.clone())
        mean.lerp_(grad, 1 - group["momentum"])
        fused = self.fused[parameter]
        direction = grad.lerp(mean, group["momentum"]).to(iteration_dtype(weight))
        if isinstance(parameter, DTensor) and not holds_whole_matrices(parameter):
            direction = whole(
                DTensor.from_local(
                    direction,
                    parameter.device_mesh,
                    parameter.placements,
                    run_check=False,
                    shape=parameter.shape,
                    stride=parameter.stride(),
                )
            )
            update = own_part(orthogonal(direction, fused), parameter).to(weight.dtype)
        else:
            update = orthogonal(direction, fused).to(weight.dtype)
        scale = MATCHED_RMS * math.sqrt(max(fused.rows, parameter.shape[-1]))
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(update, alpha=-group["lr"] * scale)
        if found_inf is not None and before is not None:  # chosen on the device, which is not waited for
            for now, then in zip((weight, mean), before, strict=True):
                torch.where(found_inf > 0, then, now, out=now)


def holds_whole_matrices(parameter: DTensor) -> bool:
    """Whether a process has all of every matrix that it has a part of: experts, divided along their first dimension."""
    return parameter.dim() > 2 and all(getattr(p, "dim", 0) == 0 for p in parameter.placements)


def orthogonal(tensor: Tensor, fused: Fused) -> Tensor:
    """Each matrix of a whole parameter for itself, by `newton_schulz`."""
    rows = tensor if fused.order is None else stored_rows(tensor, fused.order)
    update = newton_schulz(rows.reshape(-1, fused.rows, tensor.shape[-1])).reshape(tensor.shape)
    return update if fused.order is None else update[fused.order.to(update.device)]


def newton_schulz(matrices: Tensor) -> Tensor:
    """(count, rows, columns): the same singular vectors, with singular values near 1."""
    a, b, c = COEFFICIENTS
    tall = matrices.shape[-2] > matrices.shape[-1]
    x = matrices.mT if tall else matrices
    x = x / torch.linalg.matrix_norm(x, keepdim=True).clamp(min=SMALLEST)
    for _ in range(ITERATIONS):
        gram = x @ x.mT
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT if tall else x


def iteration_dtype(weight: Tensor) -> torch.dtype:
    """bfloat16 as torch has it, which most CPUs are slow in: there, and where weights are finer, the weights' own."""
    return weight.dtype if weight.device.type == "cpu" or weight.dtype == torch.float64 else torch.bfloat16
