"""What one world saved another takes up: any number of processes, any sharding, the same numbers."""

from __future__ import annotations

import pytest
import torch
from safetensors.torch import load_file, save_file

from siamesenorm.train.checkpoint.store import CheckpointStore
from siamesenorm.train.distributed import World
from siamesenorm.train.parallel import apply_parallelism
from siamesenorm.train.tensor_layout import plain_name, row_orders, stored_rows, whole
from siamesenorm.train.weights import gather_weights

from .tiny import TinyRun, tiny_model
from .worlds import Layout, run_world

NAME = "subln"  # grouped queries and norms over split features: the hardest to split
EXPERTS = {"experts": 4, "top_k": 2, "expert_dim": 12, "balance_weight": 0.0, "z_weight": 0.1}
STEPS = 2
EXACT = 1e-9


LAYOUTS = {
    "one": Layout("none", processes=1),
    "ddp-2": Layout("ddp", processes=2),
    "fsdp-2": Layout("fsdp", processes=2),
    "tp-2": Layout("tp", group=2, processes=2),
    "pp-2": Layout("ddp", pp=2, schedule="interleaved_1f1b", parts=2, processes=2),
    "fsdp-4": Layout("fsdp", processes=4),
    "hsdp-4": Layout("hsdp", group=2, processes=4),
    "tp-4": Layout("tp", group=2, processes=4),
    "pp-fsdp-4": Layout("fsdp", pp=2, parts=2, processes=4),
    "pp-tp-4": Layout("tp", group=2, pp=2, parts=2, processes=4),
    "ep-2": Layout("fsdp", ep=2, processes=2),
    "ep-fsdp-4": Layout("fsdp", ep=2, processes=4),
    "ep-tp-4": Layout("tp", group=2, ep=2, processes=4),
    "ep-pp-4": Layout("fsdp", ep=2, pp=2, parts=2, processes=4),
}
OF_TWO = ("ddp-2", "fsdp-2", "tp-2", "pp-2")
OF_FOUR = ("fsdp-4", "hsdp-4", "tp-4", "pp-fsdp-4", "pp-tp-4")
WITH_EXPERTS = ("ep-fsdp-4", "ep-tp-4", "ep-pp-4")
Reading = tuple[str, tuple[str, ...], tuple[str, ...]]
TURNS: list[tuple[int, list[Reading]]] = [
    (2, [("dense", OF_TWO, ("one",)), ("experts", ("fsdp-2", "ep-2", "pp-2"), ("one",))]),
    (
        4,
        [
            ("dense", ("fsdp-4", "tp-4", "pp-tp-4"), ("pp-2",)),
            ("dense", ("hsdp-4", "pp-fsdp-4"), ("tp-2",)),
            ("experts", ("ep-fsdp-4", "ep-tp-4"), ("pp-2",)),
            ("experts", ("ep-pp-4",), ("ep-2",)),
        ],
    ),
    (
        2,
        [
            ("dense", ("fsdp-2", "pp-2"), ("tp-4",)),
            ("dense", ("tp-2",), ("pp-tp-4",)),
            ("experts", ("fsdp-2", "ep-2"), ("ep-pp-4",)),
        ],
    ),
    (1, [("dense", ("one",), (*OF_TWO, *OF_FOUR)), ("experts", ("one",), ("fsdp-2", "ep-2", "pp-2", *WITH_EXPERTS))]),
]
"""Processes; of every model, the layouts that read, and what others have written before. Every layout does both.

A layout reads what one other wrote, and one process reads what every layout wrote.
"""


def run_of(kind: str, layout: Layout, world: World, seed: int = 0) -> TinyRun:
    """A run in float64; nothing of it depends on how a batch is divided."""
    changes = {"moe": EXPERTS} if kind == "experts" else {}
    model = tiny_model(NAME, seed, blocks=4, tied=False, **changes).double()
    model = apply_parallelism(model, world, schedule=layout.schedule, stages=2)
    return TinyRun(model, world, kind="muon", parts=layout.parts)


def everything(run):
    """Weights and moments, whole, rows in the usual order; moments of this process's stages."""
    orders = dict(row_orders(run.model))
    found = {f"model/{name}": tensor for name, tensor in gather_weights(run.model).items()}
    for name, parameter in run.model.named_parameters():
        name = plain_name(name)
        for key, value in run.optimizer.state[parameter].items():
            full = whole(value)
            ordered = name in orders and full.dim() > 0
            found[f"{name}/{key}"] = (stored_rows(full, orders[name]) if ordered else full).clone()
    return found


def begin(world, folder, kind="dense"):
    """A run of some steps, saved; what it holds, and the losses behind."""
    run = run_of(kind, LAYOUTS["one"], world)
    run.steps(STEPS)
    store = CheckpointStore(folder, 2, world)
    assert store.save(STEPS, run.state, wait=True)
    return everything(run), run.steps(1)


def reshard(world, folder, readings):
    """Every source read into every layout of this world, which saves it too; what is not as it was, and the losses."""
    wrong, losses, seen = [], {}, set()
    for kind, readers, sources in readings:
        saved = load_file(folder / f"{kind}.safetensors")
        for name in readers:
            layout = LAYOUTS[name]
            here = layout.of(world)
            run = run_of(kind, layout, here, seed=7)
            for source in sources:
                with torch.no_grad():
                    for parameter in run.model.parameters():
                        parameter.zero_()
                store = CheckpointStore(folder / kind / source, 2, here)
                run.done = store.load(store.latest(), run.state)["step"]
                loaded = everything(run)
                seen |= {(kind, name, source, key) for key in loaded}
                wrong += [(kind, source, name, key) for key in loaded if not torch.equal(saved[key], loaded[key])]
            store = CheckpointStore(folder / kind / name, 2, here)
            assert store.save(STEPS, run.state, wait=True)
            losses[kind, name] = run.steps(1)
    return wrong, losses, seen


def test_every_layout_goes_on_from_what_another_one_saved(tmp_path):
    """One, two and four processes: weights and moments are bitwise those of one, and the loss behind is the same."""
    saved, expected = {}, {}
    for kind in ("dense", "experts"):
        saved[kind], expected[kind] = begin(World(), tmp_path / kind / "one", kind)
        save_file(saved[kind], tmp_path / f"{kind}.safetensors")
    for size, readings in TURNS:
        found = [reshard(World(), tmp_path, readings)] if size == 1 else run_world(size, reshard, tmp_path, readings)
        assert all(wrong == [] for wrong, _, _ in found)
        keys = [(kind, *pair) for kind, *names in readings for pair in ((r, s) for r in names[0] for s in names[1])]
        assert set().union(*(seen for _, _, seen in found)) == {(*key, name) for key in keys for name in saved[key[0]]}
        for _, losses, _ in found:
            for (kind, name), numbers in losses.items():
                for mine, theirs in zip(numbers, expected[kind], strict=True):
                    assert mine == pytest.approx(theirs, rel=EXACT), (kind, name)


def save_and_fail(world, folder):
    run, said = TinyRun(apply_parallelism(tiny_model(NAME), world), world), []
    store = CheckpointStore(folder, 2, world, report=said.append)
    store.save(1, run.state)
    first = store.finish()
    run.step()
    if world.rank == 1:
        import os

        def full(descriptor):
            raise OSError(28, "No space left on device")

        os.fsync = full
    second = store.save(2, run.state, wait=True)
    return first, second, said, store.latest().step


def test_when_one_process_cannot_write_all_know_it(tmp_path):
    main, other = run_world(2, save_and_fail, tmp_path, mode="fsdp")
    assert main[:2] == other[:2] == (True, False)
    assert (main[3], other[3]) == (1, 1)
    assert len(main[2]) == 1
    assert other[2] == []
    assert "process 1: no space left on device" in main[2][0]


def see_damage(world, folder):
    said = []
    store = CheckpointStore(folder, 2, world, report=said.append)
    return store.latest().step, said


def test_all_processes_look_for_damage_and_agree(tmp_path):
    """Each checks a part of the files; the second process's file is the damaged one."""
    run_world(2, begin, tmp_path, mode="fsdp")
    run, store = TinyRun(tiny_model(NAME)), CheckpointStore(tmp_path, 3)
    store.latest()
    store.save(9, run.state, wait=True)
    path = tmp_path / "step-00000009" / "__0_0.distcp"
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(content)
    (step, said), (other_step, nothing) = run_world(2, see_damage, tmp_path)
    assert step == other_step == STEPS
    assert len(said) == 1
    assert "step-00000009/__0_0.distcp has another SHA-256" in said[0]
    assert nothing == []
