"""What a run may take: the machine's memory, or what control groups and ulimit leave of it."""

import resource
from pathlib import Path

import pytest
import torch

from siamesenorm.errors import ConfigError
from siamesenorm.tasks import find_task
from siamesenorm.train import memory
from siamesenorm.train.distributed import World
from siamesenorm.train.loop import train
from siamesenorm.train.memory import Room, free_memory, group_room, machine_room, process_room
from siamesenorm.train.planning.layouts import given_layout
from siamesenorm.train.planning.needs import need_of

from .small_runs import tiny

GIB = 2**30


def write_groups(root, membership: str, groups: dict[str, dict[str, object]]) -> None:
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(membership)
    for place, files in groups.items():
        folder = root / "sys/fs/cgroup" / place
        folder.mkdir(parents=True, exist_ok=True)
        for name, value in files.items():
            (folder / name).write_text(f"{value}\n")


def v2(limit: object, used: int, cache: int = 0) -> dict[str, object]:
    stat = f"anon 5\nactive_file 0\ninactive_file {cache}"
    return {"memory.max": limit, "memory.current": used, "memory.stat": stat}


def v1(limit: int, used: int, cache: int = 0) -> dict[str, object]:
    stat = f"cache {9 * cache}\ntotal_active_file {cache}"
    return {"memory.limit_in_bytes": limit, "memory.usage_in_bytes": used, "memory.stat": stat}


@pytest.mark.parametrize(
    ("membership", "groups", "free"),
    [
        ("0::/a/b\n", {"a": v2("max", 0), "a/b": v2(4 * GIB, 3 * GIB)}, 1 * GIB),
        ("0::/a/b\n", {"a": v2(2 * GIB, 1 * GIB), "a/b": v2(9 * GIB, 1 * GIB)}, 1 * GIB),  # the one above has less
        ("0::/\n", {"": v2(4 * GIB, 3 * GIB, 2 * GIB)}, 3 * GIB),  # as in a container; page cache can be had
        ("0::/../other\n", {"": v2(4 * GIB, 1 * GIB)}, 3 * GIB),
        ("0::/\n", {"": v2(1 * GIB, 3 * GIB)}, 0),
        ("3:cpu,cpuacct:/x\n4:memory:/x/y\n0::/\n", {"memory/x/y": v1(4 * GIB, 3 * GIB, GIB)}, 2 * GIB),
        ("4:memory:/not/mounted/here\n", {"memory": v1(4 * GIB, 3 * GIB)}, 1 * GIB),
        ("0::/a\n", {"a": v2("max", 5)}, None),
        ("0::/a\n", {}, None),
        ("nonsense\n::\n", {}, None),
    ],
)
def test_control_groups_leave_what_their_limits_say(tmp_path, membership, groups, free):
    write_groups(tmp_path, membership, groups)
    assert group_room(tmp_path) == (None if free is None else Room(float(free), "this control group has {} free"))


def test_without_control_groups_there_is_no_such_limit(tmp_path):
    assert group_room(tmp_path) is None


def test_the_least_of_all_limits_counts(monkeypatch):
    machine = machine_room()
    monkeypatch.setattr(memory, "machine_room", lambda: machine)  # what is free changes from moment to moment
    assert free_memory(torch.device("cpu")).size <= machine.size
    monkeypatch.setattr(memory, "group_room", lambda: Room(5.0, "this control group has {} free"))
    assert free_memory(torch.device("cpu")) == Room(5.0, "this control group has {} free")


def test_ulimit_is_the_memory_of_a_process(tmp_path, monkeypatch):
    """Each of several processes may have as much."""
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (used + GIB, resource.RLIM_INFINITY))
    assert process_room(3).size == pytest.approx(3 * process_room().size, rel=0.01)
    assert process_room().size == pytest.approx(GIB, rel=0.5)
    refused = r"parameters are not allowed here; .* and ulimit -v leaves [01]\.\d GiB; train\.memory_check=false begins"
    with pytest.raises(ConfigError, match=refused):
        train(tiny("model.dim=4096", "model.ffn_dim=65536"), tmp_path / "run")
    assert not (tmp_path / "run").exists()
    assert train(tiny("steps=1", "warmup=0"), tmp_path / "run").state == "finished"


def test_a_step_that_does_not_fit_is_refused_and_may_be_tried(monkeypatch):
    """By the plan's count, however the batch is divided; the sentence says how to go on."""
    config = tiny("batch_size=24")
    task, world = find_task(config.task)(config), World()
    need = sum(memory.memory_need(config, task, world))
    for size, fits in ((1.01 * need, True), (0.99 * need, False)):
        monkeypatch.setattr(memory, "free_memory", lambda device, processes, size=size: Room(size, "here are {} free"))
        if fits:
            memory.check_memory(config, task, world)
        else:
            with pytest.raises(
                ConfigError, match=r"a micro-batch of 24 needs .*; train\.memory_check=false begins all"
            ):
                memory.check_memory(config, task, world)
    memory.check_memory(tiny("batch_size=24", "train.memory_check=false"), task, world)


LAYOUTS = {
    "one": {},
    "fsdp": {"size": 4, "mode": "fsdp"},
    "tp": {"size": 4, "mode": "tp", "group": 2},
    "1f1b": {"size": 2, "mode": "ddp", "pp": 2},
    "gpipe": {"size": 2, "mode": "ddp", "pp": 2},
    "interleaved_1f1b": {"size": 4, "mode": "fsdp", "pp": 2},
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_a_run_is_checked_by_what_plan_says(name):
    """Of every process: its fullest moment, to the byte; a bound from below would let runs begin that do not fit."""
    how = {"size": 1, "mode": "none"} | LAYOUTS[name]
    world = World(
        0, how["size"], 0, how["size"], torch.device("cpu"), how["mode"], how.get("group"), pp=how.get("pp", 1)
    )
    parallel = [f"parallel.{field}={how[field]}" for field in ("mode", "group", "pp") if field in how]
    schedule = [f"parallel.schedule={name}"] if "pp" in how else []
    config = tiny("batch_size=16", "micro_batch_size=2", "blocks=4", *parallel, *schedule)
    planned = need_of(config, given_layout(config, world.size, world.size), "cpu")
    checked = memory.memory_need(config, find_task(config.task)(config), world)
    assert sum(checked) == world.size * planned.peak
