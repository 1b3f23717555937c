"""Memory of a training step: what autograd keeps, and the peak, for every topology and for transformers' models.

    python benchmarks/memory.py                     # writes benchmarks/results/memory.json
    python benchmarks/memory.py --quick
    python benchmarks/memory.py --shapes d512x12 --models pre siamese gr

Kept are the bytes of all distinct storages that autograd saves for backward, parameters left out, counted with
saved-tensor hooks. The peak is the growth of the resident set during a step after two others (Linux only). Every
contestant is measured in a process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from contestants import SHAPES, THEIRS, Loss, build, every_topology, in_way, next_token_loss, training, ways
from race import Results, arguments
from siamesenorm.errors import TopologyError
from siamesenorm.residual.registry import parse_topology

MEASURED = ("d256x8", "d512x12", "d64x12")
WAYS = ("eager", "compiled", "layers", "whole")


def saved_bytes(model: nn.Module, run: Any, loss: Loss) -> int:
    """Bytes of all distinct storages that autograd keeps for backward, parameters left out."""
    kept: dict[int, int] = {}
    own = {p.untyped_storage().data_ptr() for p in model.parameters()}
    alive = []

    def pack(t: Tensor) -> Tensor:
        storage = t.untyped_storage()
        if storage.data_ptr() not in own:
            kept[storage.data_ptr()] = storage.nbytes()
            alive.append(t)  # a freed storage's address could come again
        return t

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda t: t):
        loss(run)
    return sum(kept.values())


def measured(contestant: str, shape: str, quick: bool, threads: int) -> dict[str, int]:
    """Both figures of a contestant, by a process of its own."""
    command = [sys.executable, __file__, "--one", contestant, "--shapes", shape, "--threads", str(threads)]
    # Freed blocks go back at once: the peak then follows live tensors, not malloc's habits.
    environment = {**os.environ, "MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_THRESHOLD_": "65536"}
    done = subprocess.run(
        [*command, *(["--quick"] if quick else [])], check=True, stdout=subprocess.PIPE, text=True, env=environment
    )
    figures = json.loads(done.stdout.splitlines()[-1])
    print(f"{shape} {contestant}: {figures}", flush=True)
    return figures


def measure_here(contestant: str, shape_name: str, quick: bool) -> dict[str, int]:
    """The same in this process."""
    name, way = contestant.rsplit("@", 1)
    shape = SHAPES[shape_name].quick() if quick else SHAPES[shape_name]
    loss = next_token_loss(name, shape)
    (step,) = training(lambda: build(name, shape), loss, [way]).values()
    step()
    step()
    before = _resident("VmRSS")
    Path("/proc/self/clear_refs").write_text("5")  # Linux: the high-water mark starts anew
    step()
    peak = _resident("VmHWM") - before
    del step
    model = build(name, shape)
    run = in_way(lambda: build(name, shape), model, way, lambda model: model.model.layers)
    loss(run).backward()  # compiled before hooks are there
    return {"saved_bytes": saved_bytes(model, run, loss), "peak_kib": peak}


def _resident(field: str) -> int:
    line = next(line for line in Path("/proc/self/status").read_text().splitlines() if line.startswith(field))
    return int(line.split()[1])


def main() -> int:
    parser = arguments(__doc__, "memory", rounds=1)
    parser.add_argument("--shapes", nargs="+", default=list(MEASURED), choices=list(SHAPES))
    parser.add_argument("--ways", nargs="+", default=list(WAYS), choices=list(WAYS))
    parser.add_argument("--models", nargs="+", default=[*every_topology(), *THEIRS])
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        torch.set_num_threads(args.threads)
        print(json.dumps(measure_here(args.one, args.shapes[0], args.quick)))
        return 0
    try:
        for topology in (name for name in args.models if name not in THEIRS):
            parse_topology(topology)
    except TopologyError as error:
        parser.error(f"--models: {error}")
    results = Results(parser, args)
    for shape in args.shapes[:1] if args.quick else args.shapes:
        for name in ["pre", "siamese"] if args.quick else args.models:
            for way in (way for way in ways(name) if way in args.ways):
                results.measure(
                    f"{shape} {name}@{way}",
                    lambda name=name, way=way, shape=shape: measured(f"{name}@{way}", shape, args.quick, args.threads),  # type: ignore[misc]
                )
    return results.close()


if __name__ == "__main__":
    sys.exit(main())
