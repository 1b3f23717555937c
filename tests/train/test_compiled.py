"""Compiled blocks: one graph a shape of block, no graph breaks, no recompiles, the same losses, in every layout."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from torch._dynamo.utils import counters

from siamesenorm.models.lm import LanguageModel, LMConfig
from siamesenorm.models.stack import Block
from siamesenorm.residual import TOPOLOGIES
from siamesenorm.train.activations import checkpoint_activations
from siamesenorm.train.distributed import World
from siamesenorm.train.parallel import apply_parallelism

from .tiny import TinyRun, tiny_model
from .worlds import run_world

BLOCKS = 4
OTHER_FIRST_BLOCK = {"hybrid_star", "span", "keel"}
"""Topologies whose block 0 differs from the others; Mix-LN's first quarter does too, and widen's rows come in turn."""
GROWING = {"attnres": BLOCKS, "dense": BLOCKS, "x0": 3}
"""Streams that grow in number: with every group or block, or once, behind the block that keeps the middle state."""
SHAPES = {name: 2 if name in {*OTHER_FIRST_BLOCK, "mix", "widen"} else GROWING.get(name, 1) for name in TOPOLOGIES}

KINDS = ("pre", "siamese", "hyper", "attnres", "span", "x0", "widen")
"""One stream, two, several rows, some that grow; first blocks of their own, a middle state, rows in turn."""


def model_of(topology: str) -> LanguageModel:
    sizes = {"vocab_size": 32, "dim": 16, "blocks": BLOCKS, "heads": 4, "ffn_dim": 24}
    return LanguageModel(LMConfig(**sizes, topology=topology), seed=0)


def train(topology, world=None, checkpointing="none", compiled=True, steps=2, dtype=torch.float32):
    """Losses of some steps, graphs, graph breaks, and graphs made after the first step."""
    torch._dynamo.reset()
    counters.clear()
    original = Block.compile
    # Graphs are counted here, not their code: inductor would take a minute for each. Derivatives of topologies in a
    # graph are `tests/residual/test_compile.py`'s subject; those of the sublayers are the same on all.
    traced = world is None and checkpointing == "full" and topology in ("siamese", "hyper")
    backend = "aot_eager" if traced else "eager"
    Block.compile = lambda self, **how: original(self, backend=backend, **how)
    try:
        model = model_of(topology).to(dtype)
        checkpoint_activations(model, checkpointing)
        if world is not None:
            model = apply_parallelism(model, world, compiled=compiled)
        elif compiled:
            model.compile_blocks()
        run = TinyRun(model, world)
        losses = [run.step()]
        first = counters["stats"]["unique_graphs"]
        losses += run.steps(steps - 1)
    finally:
        Block.compile = original
    graphs = counters["stats"]["unique_graphs"]
    return losses, graphs, sum(counters["graph_break"].values()), graphs - first


def assert_one_graph_a_shape(result, topology, expected, close=1e-4):
    losses, graphs, breaks, later = result
    assert (graphs, breaks, later) == (SHAPES[topology], 0, 0), topology
    for mine, theirs in zip(losses, expected, strict=True):
        assert mine == pytest.approx(theirs, rel=close), topology


@functools.cache
def eager_losses(topology, dtype=torch.float32):
    return train(topology, compiled=False, dtype=dtype)[0]


def test_what_is_kept_selectively_is_in_the_graph():
    result = train("siamese", checkpointing="selective")
    assert_one_graph_a_shape(result, "siamese", eager_losses("siamese"))


@pytest.mark.parametrize("checkpointing", ["none", "full"])
def test_one_process(checkpointing):
    """All topologies; whole blocks computed again with two streams, rows, and streams that grow.

    Sublayers are computed again in `test_two_processes`, with every kind of streams.
    """
    for topology in TOPOLOGIES if checkpointing == "none" else ("siamese", "hyper", "attnres"):
        assert_one_graph_a_shape(train(topology, checkpointing=checkpointing), topology, eager_losses(topology))


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_no_autocast_stays_open_behind_recomputation(backend):
    """Which an exception ends, in the midst of a graph; behind it, casts of weights would be kept for ever."""
    torch._dynamo.reset()
    model, ids = model_of("hyper"), torch.randint(0, 32, (2, 9))
    checkpoint_activations(model, "full")
    model.compile_blocks(backend=backend)
    with torch.autocast("cpu", torch.bfloat16):
        loss = model(ids[:, :-1], labels=ids[:, 1:]).loss
    loss.backward()
    torch.autocast_increment_nesting()
    assert torch.autocast_decrement_nesting() == 0


def train_kinds(world, checkpointing, kinds):
    """Each of two processes compiles every second one: the other one's eager blocks meet the same collectives."""
    found = {}
    for number, topology in enumerate(kinds):
        compiled = number % world.size == world.rank
        kind = checkpointing if compiled else "none"
        found[topology] = (compiled, *train(topology, world, kind, compiled, dtype=torch.float64))
    return found


@pytest.mark.parametrize(
    ("mode", "checkpointing", "kinds"),
    [("fsdp", "sublayer", KINDS), ("tp", "none", KINDS[:3])],
)
def test_two_processes(mode, checkpointing, kinds):
    """Losses and gradient norms to float64's rounding."""
    results = run_world(2, train_kinds, checkpointing, kinds, mode=mode, group=2)
    for topology in kinds:
        (result,) = (rest for compiled, *rest in (found[topology] for found in results) if compiled)
        assert_one_graph_a_shape(result, topology, eager_losses(topology, torch.float64), 1e-9)


SPREAD = {"experts": ("fsdp", 2, 1), "siamese": ("ddp", 1, 2)}
"""Models, and how two processes share them: mode, `ep` and `pp`."""


def train_spread(world):
    """Losses, graphs, graph breaks, and graphs made after the first step, of experts and of a pipeline."""
    original, found = Block.compile, {}
    Block.compile = lambda self, **how: original(self, backend="eager", **how)
    try:
        for name, (mode, ep, pp) in SPREAD.items():
            torch._dynamo.reset()
            counters.clear()
            places = (world.rank, world.size, world.local_rank, world.local_size)
            spread = World(*places, None, mode, ep=ep, pp=pp)
            model = apply_parallelism(tiny_model(name, blocks=BLOCKS, tied=False).double(), spread, compiled=True)
            run = TinyRun(model, spread, parts=pp)
            losses, first = run.steps(1), counters["stats"]["unique_graphs"]
            losses += run.steps(1)
            graphs = counters["stats"]["unique_graphs"]
            found[name] = losses, graphs, sum(counters["graph_break"].values()), graphs - first
    finally:
        Block.compile = original
    return found


def test_experts_and_pipelines():
    """A graph for each half of a block around its exchanged experts, with a break between; one graph in a pipeline."""
    for found in run_world(2, train_spread):
        for name, (losses, *graphs) in found.items():
            assert graphs == ([2, 2, 0] if name == "experts" else [1, 0, 0])
            _, ep, pp = SPREAD[name]
            one = TinyRun(tiny_model(name, blocks=BLOCKS, tied=False).double(), parts=pp, ranks=ep)
            for mine, theirs in zip(losses, one.steps(2), strict=True):
                assert mine == pytest.approx(theirs, rel=1e-9)


def test_a_copy_is_not_compiled_and_computes_the_same():
    model, ids = model_of("siamese"), torch.randint(0, 32, (2, 8))
    model.compile_blocks(backend="eager")
    twin = copy.deepcopy(model)
    assert all(block._compiled is None for block in twin.blocks)
    torch.testing.assert_close(twin(ids).logits, model(ids).logits)
