"""Every way to spread a model, and their combinations, do what one process does: one table, worlds of four and two."""

from __future__ import annotations

from typing import Any

import pytest

from closeness import assert_same_but_for_rounding
from siamesenorm.residual.registry import TOPOLOGIES
from siamesenorm.train.distributed import World
from siamesenorm.train.ema import WeightAverage
from siamesenorm.train.parallel import apply_parallelism
from siamesenorm.train.weights import gather_weights

from .tiny import TinyRun, tiny_model
from .worlds import Layout, run_world

STEPS = 2
EXACT = 1e-9


PIPELINES = {
    "pp2-fsdp2": Layout("fsdp", pp=2, parts=2),
    "pp4": Layout("ddp", pp=4, parts=4, blocks=5),
    "pp2-tp2": Layout("tp", group=2, pp=2, parts=2),
    "pp2-interleaved-fsdp2": Layout("fsdp", pp=2, schedule="interleaved_1f1b", parts=2, blocks=4),
    "pp2-gpipe-hsdp2": Layout("hsdp", group=1, pp=2, schedule="gpipe", parts=2),
}
OF_TWO = {
    "pp2": Layout("ddp", pp=2, parts=2, processes=2),
    "pp2-gpipe": Layout("ddp", pp=2, schedule="gpipe", parts=2, processes=2),
    "pp2-interleaved": Layout("ddp", pp=2, schedule="interleaved_1f1b", parts=2, blocks=4, processes=2),
}
LAYOUTS = {
    "ep4": Layout("fsdp", ep=4),
    "ep2-fsdp2": Layout("fsdp", ep=2),
    "ep2-hsdp2": Layout("hsdp", group=2, ep=2),
    "ep2-tp2": Layout("tp", group=2, ep=2),
    "pp2-ep2": Layout("fsdp", ep=2, pp=2, parts=2),
    **PIPELINES,
    **OF_TWO,
}
CLOSELY = [
    ("experts", "ep4", "adamw"),
    ("experts", "ep2-fsdp2", "muon"),
    ("experts", "ep2-hsdp2", "adamw"),
    ("experts", "ep2-tp2", "muon"),
    ("experts", "pp2-ep2", "muon"),
    ("wide_experts", "ep2-fsdp2", "adamw"),
    ("siamese", "pp2-fsdp2", "muon"),
    ("siamese", "pp4", "adamw"),
    ("siamese", "pp2-tp2", "adamw"),
    ("attnres", "pp2-interleaved-fsdp2", "adamw"),  # streams that grow
    ("siamese", "pp2-gpipe-hsdp2", "adamw"),
]
"""Models, layouts, optimisers; of these, averaged weights are looked at too. Plain FSDP is `test_distributed.py`'s."""
TABLE = [
    *CLOSELY,
    *((name, [*OF_TWO][n % len(OF_TWO)], "adamw") for n, name in enumerate(TOPOLOGIES) if name != "siamese"),
]
"""Every topology in a pipeline at least."""


def trained(row: tuple[str, str, str], world: World | None = None) -> tuple[Any, ...]:
    """Losses and gradient norms of a step or two in float64, weights behind them, and averaged weights."""
    name, layout, kind = row[0], LAYOUTS[row[1]], row[2]
    model = tiny_model(name, blocks=layout.blocks, tied=False).double()
    model = apply_parallelism(model, world or World(), schedule=layout.schedule, stages=2)
    ranks = 1 if world else layout.processes // layout.pp // (layout.group or 1 if layout.mode == "tp" else 1)
    run = TinyRun(model, world, kind=kind, parts=layout.parts, ranks=ranks)
    if row not in CLOSELY:
        return run.steps(1), gather_weights(model), {}
    numbers, average = [], WeightAverage(model, 0.5)
    for step in range(1, STEPS + 1):
        numbers.append(run.step())
        average.update(step)
    with average.applied():
        averaged = gather_weights(model)
    return numbers, gather_weights(model), averaged


def go_through(world, table):
    found: dict[Any, Any] = {}
    for row in table:
        results = trained(row, LAYOUTS[row[1]].of(world))
        found[row] = results if world.is_main else results[:1]
    return found


@pytest.fixture(scope="module")
def worlds():
    """What every process of a row's world found."""
    found = {}
    for processes in (4, 2):
        rows = [row for row in TABLE if LAYOUTS[row[1]].processes == processes]
        answers = run_world(processes, go_through, rows)
        found |= {row: [answer[row] for answer in answers] for row in rows}
    return found


@pytest.mark.parametrize("row", TABLE, ids="-".join)
def test_many_processes_train_as_one(worlds, row):
    """Losses, gradient norms, weights and averaged weights; `test_checkpoint_resharding.py` saves them."""
    numbers, weights, averaged = trained(row)
    for one in worlds[row]:
        for mine, theirs in zip(one[0], numbers, strict=True):
            assert mine == pytest.approx(theirs, rel=EXACT)
    assert_same_but_for_rounding(worlds[row][0][1], weights, EXACT)
    assert_same_but_for_rounding(worlds[row][0][2], averaged, EXACT)
