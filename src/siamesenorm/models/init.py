"""First weights of any model: one part after the other, under the topology's `InitRule`.

The rule is one std for all weights where the topology's authors fix it, a factor by role, and whether an
initialiser's own depth factor stays. What a weight is drawn from, and what lies before and behind the blocks, each
family says itself: ``lm/init.py``, ``vit/init.py``, ``dit/init.py``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from siamesenorm.models.parametrization import base_depth, base_width, width_ratio
from siamesenorm.residual import Place

if TYPE_CHECKING:
    from siamesenorm.models.stack import Stack

PartContext = Callable[[nn.Module], AbstractContextManager[object]]
"""What is done before and after a part of a model gets its values: a block, the residual, an embedding or a head.

The model itself stands for what it holds beside its modules."""

DRAWN = (nn.Linear, nn.Conv2d, nn.Embedding)


class FirstWeights(ABC):
    """Gives every parameter of a model its first value: ``FirstWeights(model, seed).fill()``.

    part_context: may allocate a part of a model on ``meta`` before, and shard it afterwards; the values are the same.
    """

    model: Stack[Any]
    config: Any

    def __init__(self, model: Stack[Any], seed: int | None = None, part_context: PartContext = nullcontext) -> None:
        self.model, self.config, self.part_context = model, model.config, part_context
        self.rule = model.residual.init_rule
        there = next(model.parameters()).device
        self.device = torch.device("cpu") if there.type == "meta" else there
        self.generator = None if seed is None else torch.Generator(self.device).manual_seed(seed)
        self.seed, self.parts = seed, 0
        self.wide = width_ratio(self.config)
        self.base_width, self.base_depth = base_width(self.config), base_depth(self.config)

    @torch.no_grad()
    def fill(self) -> None:
        """All of the model. The draws do not depend on the topology, only their size does."""
        self.embedding()
        places = iter(self.model.residual.places)
        for block in self.model.blocks:
            with self.part(block):
                for sublayer in block.sublayers:  # type: ignore[union-attr]  # ModuleList holds blocks
                    place = next(places)
                    for role, weight in sublayer.role_weights():
                        self.projection(weight, place, role)
        with self.part(self.model.residual):
            pass
        self.head()

    @abstractmethod
    def embedding(self) -> None:
        """What lies before the blocks."""

    @abstractmethod
    def projection(self, weight: Tensor, place: Place, role: Any) -> None:
        """One weight of a sublayer."""

    @abstractmethod
    def head(self) -> None:
        """What lies behind them."""

    @contextmanager
    def part(self, part: nn.Module) -> Iterator[None]:
        """A part whose weights are drawn inside; all else in it has its values already."""
        with self.part_context(part):
            with self.draws_of_its_own():
                self.constants(part)
            yield

    @contextmanager
    def draws_of_its_own(self) -> Iterator[None]:
        """Draws by the seed that leave those of sublayers as they are: whatever the topology, these start alike."""
        if self.seed is None:
            yield
            return
        self.parts += 1
        devices = [] if self.device.type == "cpu" else [self.device]
        with torch.random.fork_rng(devices, device_type=self.device.type if devices else "cuda"):
            torch.manual_seed(self.seed + 1_000_003 * self.parts)
            yield

    def constants(self, part: nn.Module) -> None:
        """First values of norms, links, biases, and what a topology holds itself: nearly all of them are constants."""
        for module in part.modules():
            if isinstance(module, DRAWN):
                if isinstance(bias := getattr(module, "bias", None), Tensor):
                    nn.init.zeros_(bias)
            elif hasattr(module, "role_weights"):
                for parameter in module.parameters(recurse=False):
                    nn.init.zeros_(parameter)  # biases of stacked experts; their weights are drawn
            else:
                reset: Callable[[], None] = getattr(module, "reset_parameters", lambda: None)
                reset()
                self.narrow(module)

    def narrow(self, module: nn.Module) -> None:
        """What a module has drawn itself and sums over the width, smaller in a model that is wider than its base."""
        if self.wide != 1 and callable(sums := getattr(module, "width_sums", None)):
            for name in sums():
                if (parameter := module._parameters.get(name)) is not None:
                    parameter.mul_(self.wide**-0.5)

    def std(self, own: float, role: Any) -> float:
        """An initialiser's own std for a projection, under the topology's rule, which knows nothing of widths."""
        if self.rule.std is not None:
            own = self.rule.std * self.wide**-0.5
        return own * self.rule.scale.get(role, 1.0)

    def draw(self, weight: Tensor, std: float) -> None:
        """Fill a weight; one without memory stays as it is."""
        if not weight.is_meta:
            weight.normal_(0, std, generator=self.generator)
