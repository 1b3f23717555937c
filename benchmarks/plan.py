"""What `siamesenorm plan` predicts beside what runs of two and four processes take: memory at its fullest, bytes sent.

    python benchmarks/plan.py                       # writes benchmarks/results/plan.json
    python benchmarks/plan.py --quick

Memory is the growth of the first process's resident set from before the model is made to the fullest moment of its
third step, in pipelines the largest of all processes'. A tiny model has taken steps before, so that code and threads
are there, and the largest matrices were multiplied, for which the mathematical library keeps buffers of its own. Every
run has processes of its own: what an earlier one has not given back would hide a later one's growth. Bytes are what
the system counts on the process's sockets during that step (Linux only). Processes are those of ``torchrun``: the real
engine over gloo, in fp32 on CPUs. Gloo scatters sums by summing them everywhere, which sends twice a ring's bytes, and
is predicted so.
"""

from __future__ import annotations

import argparse
import contextlib
import ctypes
import gc
import json
import os
import socket
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from race import Results, arguments

TOPOLOGIES = ("pre", "siamese", "siamese:form=hybrid_pre", "hyper", "mhc", "attnres", "gr")
SHAPE = (
    "model.dim=192",
    "model.blocks=4",
    "model.heads=4",
    "model.ffn_dim=512",
    "model.vocab_size=4096",
    "model.max_length=128",
    "data.sequence_length=128",
    "evaluation.every=null",
    "train.steps=3",
    "schedule.warmup=0",
    "train.compile=false",
)
EXPERTS = "model.moe={experts: 8, top_k: 2, expert_dim: 256}"
ROWS = 4
"""Sequences of 128 tokens that a process computes at a time."""


def cases(quick: bool) -> list[dict[str, Any]]:
    """Topology, processes, layout, checkpointing and parts of a batch."""
    if quick:
        return [{"topology": "pre", "processes": 2, "mode": "fsdp", "checkpointing": "none", "parts": 1}]
    found = [
        {"topology": topology, "processes": 2, "mode": mode, "checkpointing": kind, "parts": 1}
        for topology in TOPOLOGIES
        for mode, kind in (("ddp", "none"), ("fsdp", "none"), ("tp", "none"), ("fsdp", "full"))
    ]
    extra = {"topology": "siamese", "checkpointing": "none"}
    found.append({**extra, "processes": 2, "mode": "tp", "whole": True, "parts": 1})  # streams and vocabulary
    found += [{**extra, "processes": 2, "mode": mode, "parts": 2} for mode in ("ddp", "fsdp")]
    found.append({**extra, "processes": 2, "mode": "ddp", "checkpointing": "sublayer", "parts": 1})
    found += [
        {**extra, "processes": 4, "mode": mode, "group": group, "parts": 1}
        for mode, group in (("fsdp", None), ("hsdp", 2), ("tp", 2))
    ]
    experts = {"topology": "pre", "checkpointing": "none", "mode": "fsdp", "parts": 1}
    found += [{**experts, "processes": size, "ep": ep} for size, ep in ((2, 1), (2, 2), (4, 2))]
    piped = {"topology": "siamese", "checkpointing": "none", "pp": 2}
    found += [{**piped, "processes": 2, "mode": "ddp", "parts": parts} for parts in (2, 4)]
    found.append({**piped, "topology": "attnres", "processes": 2, "mode": "ddp", "checkpointing": "full", "parts": 4})
    for schedule in ("gpipe", "interleaved_1f1b"):
        found.append({**piped, "processes": 2, "mode": "ddp", "parts": 4, "schedule": schedule})
    found += [
        {**piped, "processes": 4, "mode": mode, "group": group, "parts": 4}
        for mode, group in (("fsdp", None), ("tp", 2))
    ]
    return found


def config_of(case: dict[str, Any]) -> Any:
    """The run of a case."""
    from siamesenorm.train.recipes import resolve

    data = case["processes"] // case.get("pp", 1)
    if case["mode"] == "tp":
        data //= case.get("group") or data
    group = [f"parallel.group={case['group']}"] if case.get("group") else []
    if case.get("whole"):
        group += ["parallel.sequence_parallel=false", "parallel.loss_parallel=false"]
    if "ep" in case:
        group += [EXPERTS, f"parallel.ep={case['ep']}"]
    if "pp" in case:
        group += [f"parallel.pp={case['pp']}", f"parallel.schedule={case.get('schedule', '1f1b')}"]
    return resolve(
        "lm-tiny",
        [
            *SHAPE,
            f"model.topology={case['topology']}",
            f"parallel.mode={case['mode']}",
            "parallel.device=cpu",
            *group,
            f"train.activation_checkpointing={case['checkpointing']}",
            f"train.micro_batch_size={ROWS}",
            f"train.batch_size={ROWS * case['parts'] * data}",
        ],
    )


def predicted(case: dict[str, Any]) -> dict[str, float]:
    """What the plan says of one process."""
    from siamesenorm.train.distributed import World
    from siamesenorm.train.planning.layouts import layout_of
    from siamesenorm.train.planning.needs import need_of
    from siamesenorm.train.planning.timing import sent_by

    config = config_of(case)
    size = case["processes"]
    world = World(0, size, 0, size, **places(case))
    layout = layout_of(config, world)
    need = need_of(config, layout, "cpu")
    sent = sent_by(config, layout)
    return {
        "peak": need.peak,
        "activations": need.activations,
        "sent": sent.all + sent.reduce_scatter + sent.tensor_scattered,
    }


def places(case: dict[str, Any]) -> dict[str, Any]:
    """How a world's processes are divided."""
    return {"mode": case["mode"], "group": case.get("group"), "ep": case.get("ep", 1), "pp": case.get("pp", 1)}


def free_ports(count: int) -> list[int]:
    """Ports that nobody listens on."""
    with contextlib.ExitStack() as stack:
        found = [stack.enter_context(contextlib.closing(socket.socket())) for _ in range(count)]
        for one in found:
            one.bind(("localhost", 0))
        return [one.getsockname()[1] for one in found]


def measured(chosen: list[dict[str, Any]]) -> Iterator[dict[str, float]]:
    """What the first process of each run took, run after run."""
    size = chosen[0]["processes"]
    # Freed blocks go back at once: the peak then follows live tensors, not malloc's habits.
    fixed = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "0"}
    fixed |= {"OMP_NUM_THREADS": "1", "MASTER_ADDR": "localhost", "WORLD_SIZE": str(size)}
    runs = [{"port": port, "case": case} for port, case in zip(free_ports(len(chosen)), chosen, strict=True)]
    children = []
    for rank in range(size):
        own = {**os.environ, **fixed, "RANK": str(rank), "LOCAL_RANK": str(rank), "LOCAL_WORLD_SIZE": str(size)}
        command = [sys.executable, __file__, "--here", json.dumps(runs)]
        out = subprocess.PIPE if rank == 0 else subprocess.DEVNULL
        children.append(subprocess.Popen(command, env=own, stdout=out, text=True))
    try:
        assert children[0].stdout is not None
        yield from map(json.loads, children[0].stdout)
    finally:
        for child in children:
            child.kill()
            child.wait()


def measure_here(runs: list[dict[str, Any]]) -> None:
    """The same in one rank: a line a run, each in a process that is forked for it once everything is imported."""
    from siamesenorm.train.distributed import World
    from siamesenorm.train.engine import Engine as Engine

    torch.set_num_threads(1)
    for run in runs:
        os.environ["MASTER_PORT"] = str(run["port"])
        child = os.fork()
        if child == 0:
            world = World.start(config_of(run["case"]).parallel)
            print(json.dumps(measure_one(run["case"], world)), flush=True)
            world.barrier()
            os._exit(0)
        if os.waitpid(child, 0)[1]:
            raise SystemExit(1)


def measure_one(case: dict[str, Any], started: Any) -> dict[str, float]:
    """One run's memory and bytes, of this process."""
    from siamesenorm.tasks import find_task
    from siamesenorm.train.distributed import World
    from siamesenorm.train.engine import Engine

    world = World(started.rank, started.size, started.rank, started.size, **places(case))
    config = config_of(case)
    small = config.model_copy(
        update={"model": config.model.model_copy(update={"dim": 32, "ffn_dim": 32, "vocab_size": 258})}
    )
    steps_of(Engine(small, find_task(small.task)(small), world), 2)  # code and threads are there now
    multiply(ROWS * config.sample_tokens, config.model.dim, config.model.vocab_size)
    task = find_task(config.task)(config)
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)  # free pages among small tensors would hide growth too
    before = resident("VmRSS")
    engine = Engine(config, task, world)
    steps_of(engine, 2, close=False)
    world.barrier()
    Path("/proc/self/clear_refs").write_text("5")  # the high-water mark starts anew
    sent = bytes_sent()
    steps_of(engine, 1, first=3)
    took = {"peak": 1024.0 * (resident("VmHWM") - before), "sent": float(bytes_sent() - sent)}
    if world.pp == 1:
        return took
    return {name: max(one[name] for one in world.gather(took)) for name in took}  # as a plan counts stages


def multiply(rows: int, inner: int, columns: int) -> None:
    """A matrix product and its gradients, of no further use."""
    given, weight = (torch.ones(size, requires_grad=True) for size in ((rows, inner), (inner, columns)))
    (given @ weight).sum().backward()


def steps_of(engine: Any, count: int, first: int = 1, close: bool = True) -> None:
    """So many training steps."""
    for step in range(first, first + count):
        engine.compute(step).numbers  # noqa: B018  # waits for it
        engine.apply(step)
    if close:
        engine.close()


def resident(field: str) -> int:
    """KiB of this process."""
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1])


BYTES_ACKED = 120
"""Where struct tcp_info of <linux/tcp.h> has the bytes that the other side has acknowledged."""


def bytes_sent() -> int:
    """By all TCP connections of this process so far."""
    total = 0
    for name in os.listdir("/proc/self/fd"):
        try:
            if not os.readlink(f"/proc/self/fd/{name}").startswith("socket:"):
                continue
        except OSError:  # the folder that is being listed
            continue
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(int(name))) as connection:
            if connection.family in (socket.AF_INET, socket.AF_INET6) and connection.type == socket.SOCK_STREAM:
                info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 192)
                total += struct.unpack_from("Q", info, BYTES_ACKED)[0]
    return total


def name_of(case: dict[str, Any]) -> str:
    """A case in words."""
    group = f" {case['group']}" if case.get("group") else ""
    group += " whole" if case.get("whole") else ""
    parts = f", {case['parts']} parts" if case["parts"] > 1 else ""
    parts += f", experts, ep {case['ep']}" if "ep" in case else ""
    parts += f", pp {case['pp']} {case.get('schedule', '1f1b')}" if "pp" in case else ""
    return f"{case['topology']}, {case['processes']} × {case['mode']}{group}, {case['checkpointing']}{parts}"


def main() -> int:
    parser = arguments(__doc__, "plan", rounds=1)
    parser.add_argument("--only", default="", help="cases whose name has this in it")
    parser.add_argument("--here", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.here:
        measure_here(json.loads(args.here))
        return 0
    results = Results(parser, args)
    known = results.data["facts"]
    if args.fresh:
        known.clear()
        results.data["command"] = results.data["command"].split("; ")[-1]
    missing = [case for case in cases(args.quick) if args.only in name_of(case) and name_of(case) not in known]
    for size in sorted({case["processes"] for case in missing}):
        chosen = [case for case in missing if case["processes"] == size]
        for case, took in zip(chosen, measured(chosen), strict=False):  # fewer, where a run fails
            known[name_of(case)] = {**case, "measured": took}
            results.write()
    for name, case in known.items():  # what is predicted may change, what was measured stays
        case["predicted"] = predicted(case)
        shares = {key: case["predicted"][key] / case["measured"][key] for key in ("peak", "sent")}
        print(name, {key: round(share, 3) for key, share in shares.items()}, flush=True)
    return results.close()


if __name__ == "__main__":
    sys.exit(main())
