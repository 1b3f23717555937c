"""What one world saved another takes up: any number of processes, any sharding, the same numbers."""

from __future__ import annotations

import torch

from siamesenorm.train.checkpoint import CheckpointStore
from siamesenorm.train.distributed import World
from siamesenorm.train.layout import plain_name, row_orders, usual_rows, whole
from siamesenorm.train.parallel import apply_parallelism
from siamesenorm.train.weights import gather_weights

from .test_distributed import assert_close
from .tiny import TinyRun, tiny_model
from .worlds import run_world

NAME = "subln"  # grouped queries and norms over split features: the hardest to split
STEPS = 2


def everything(run):
    """Weights and moments, whole, rows in the usual order."""
    orders = dict(row_orders(run.model))
    found = {f"model/{name}": tensor for name, tensor in gather_weights(run.model).items()}
    for name, parameter in run.model.named_parameters():
        name = plain_name(name)
        for key, value in run.optimizer.state[parameter].items():
            full = whole(value)
            ordered = name in orders and full.dim() > 0
            found[f"{name}/{key}"] = (usual_rows(full, orders[name]) if ordered else full).clone()
    return found


def begin(world, folder):
    """A run of some steps, saved; what it holds, and the losses behind."""
    run = TinyRun(apply_parallelism(tiny_model(NAME), world), world, kind="muon")
    run.steps(STEPS)
    store = CheckpointStore(folder, 2, world)
    assert store.save(STEPS, run.state, wait=True)
    return everything(run), run.steps(STEPS)


def reshard(world, folder, modes, sources, saved):
    """Every source read into every layout of this world, which saves it too; what is not as it was, and the losses."""
    wrong, losses = [], {}
    stores = {source: CheckpointStore(folder / source, 2, world) for source in sources}
    for mode in modes:
        here = World(world.rank, world.size, world.local_rank, world.local_size, world.device, mode, 2)
        run = TinyRun(apply_parallelism(tiny_model(NAME, seed=7), here), here, kind="muon")
        for source in sources:
            with torch.no_grad():
                for parameter in run.model.parameters():
                    parameter.zero_()
            run.done = stores[source].load(stores[source].latest(), run.state)["step"]
            loaded = everything(run)
            assert saved.keys() == loaded.keys()
            wrong += [(source, mode, name) for name, tensor in saved.items() if not torch.equal(tensor, loaded[name])]
        store = CheckpointStore(folder / layout(mode, here.size), 2, here)
        assert store.save(STEPS, run.state, wait=True)
        losses[mode] = run.steps(STEPS)
    return wrong, losses


def layout(mode, size):
    return f"{mode}-{size}"


TURNS = [
    (2, ("ddp", "fsdp", "tp"), ("none-1",)),
    (4, ("ddp", "fsdp", "hsdp", "tp"), ("fsdp-2", "tp-2")),
    (2, ("fsdp", "tp"), ("ddp-4", "fsdp-4", "hsdp-4", "tp-4")),
    (1, ("none",), ("ddp-2", "fsdp-2", "tp-2", "hsdp-4", "tp-4")),
]
"""Processes, the layouts that read, and what others have written before."""


def test_every_layout_goes_on_from_what_another_one_saved(tmp_path):
    """One, two and four processes: weights and moments are bitwise those of one, and the losses behind are the same."""
    saved, expected = begin(World(), tmp_path / "none-1")
    for size, modes, sources in TURNS:
        arguments = (tmp_path, modes, sources, saved)
        found = [reshard(World(), *arguments)] if size == 1 else run_world(size, reshard, *arguments, mode="ddp")
        for wrong, losses in found:
            assert wrong == []
            for mode in modes:
                assert_close(losses[mode], expected)


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
