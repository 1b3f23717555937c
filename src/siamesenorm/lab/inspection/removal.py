"""Loss rise when a sublayer, or all sublayers of a block, are removed: their outputs are replaced by zero."""

from __future__ import annotations

from collections.abc import Callable, Collection

import torch
from torch import Tensor

from siamesenorm.lab.inspection.result import Removal
from siamesenorm.lab.inspection.subject import Subject
from siamesenorm.lab.inspection.watch import Watcher, watched
from siamesenorm.residual import Place, Topology


class Without(Watcher):
    """Writes zero in place of some sublayers' outputs."""

    def __init__(self, indices: Collection[int]) -> None:
        self.indices = indices

    def output(self, place: Place, output: Tensor) -> Tensor:
        """Zero, or the output."""
        return torch.zeros_like(output) if place.index in self.indices else output


def measure_removal(subject: Subject, topology: Topology, progress: Callable[[int, int], None]) -> Removal:
    """One pass with nothing removed, one without each sublayer and one without each block."""
    sublayers: list[tuple[int, ...]] = [(place.index,) for place in topology.places]
    blocks: list[list[int]] = [[] for _ in range(topology.places[0].blocks)]
    for place in topology.places:
        blocks[place.block].append(place.index)
    passes: list[Collection[int]] = [(), *sublayers, *(block for block in blocks if len(block) > 1)]
    losses = []
    for done, indices in enumerate(passes):
        losses.append(loss_without(subject, topology, indices))
        progress(done + 1, len(passes))
    whole, rises = losses[0], [loss - losses[0] for loss in losses[1:]]
    of_sublayers, rest = rises[: len(sublayers)], iter(rises[len(sublayers) :])
    of_blocks = [of_sublayers[block[0]] if len(block) == 1 else next(rest) for block in blocks]
    return Removal(loss=whole, sublayers=tuple(of_sublayers), blocks=tuple(of_blocks))


@torch.no_grad()
def loss_without(subject: Subject, topology: Topology, indices: Collection[int]) -> float:
    """The loss with zero in place of the outputs of these sublayers."""
    with watched(topology, Without(indices)):
        loss = subject.run()
    assert loss is not None
    return loss.item()
