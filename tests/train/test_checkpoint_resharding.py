"""What one world saved another takes up: any number of processes, any sharding, the same numbers."""

from __future__ import annotations

import pytest
import torch

from siamesenorm.train.checkpoint import CheckpointStore
from siamesenorm.train.distributed import World
from siamesenorm.train.layout import plain_name, row_orders, usual_rows, whole
from siamesenorm.train.parallel import apply_parallelism
from siamesenorm.train.weights import export_weights, gather_weights

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


def begin(world, folder, kind=""):
    run = TinyRun(apply_parallelism(tiny_model(NAME), world), world, kind=kind)
    run.steps(STEPS)
    store = CheckpointStore(folder, 2, world)
    assert store.save(STEPS, run.state, wait=True)
    export_weights(run.model, folder / "weights.safetensors", is_main=world.is_main)
    return everything(run), run.steps(STEPS)


def go_on(world, folder, kind):
    run = TinyRun(apply_parallelism(tiny_model(NAME, seed=7), world), world, kind=kind)
    store = CheckpointStore(folder, 2, world)
    run.done = store.load(store.latest(), run.state)["step"]
    return everything(run), run.steps(STEPS)


def in_world(mode, work, *args):
    if mode == "none":
        return work(World(), *args)
    size = 4 if mode == "hsdp" else 2
    return run_world(size, work, *args, mode=mode, group=2)[0]


@pytest.mark.parametrize(
    ("first", "then", "kind"),
    [
        ("none", "fsdp", "adamw"),
        ("fsdp", "none", "muon"),
        ("fsdp", "ddp", "adamw"),
        ("ddp", "tp", "muon"),
        ("tp", "fsdp", "muon"),
        ("tp", "none", "adamw"),
    ],
)
def test_another_world_goes_on_from_the_same_numbers(tmp_path, first, then, kind):
    saved, losses = in_world(first, begin, tmp_path, kind)
    loaded, others = in_world(then, go_on, tmp_path, kind)
    assert saved.keys() == loaded.keys()
    for name, tensor in saved.items():
        assert torch.equal(tensor, loaded[name]), name
    assert_close(others, losses)


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
