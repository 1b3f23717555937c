"""Time of the first, compiling training step by number of blocks, with nothing in any cache.

    python benchmarks/compile_time.py               # writes benchmarks/results/compile_time.json
    python benchmarks/compile_time.py --quick

Every figure is of a process of its own with an empty compiler cache; processes take turns, ``--rounds`` of them for
each contestant and depth. Width 256, one sequence of 64 tokens, so that nearly all of the step is compilation.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from dataclasses import replace

import torch
from torch._dynamo.utils import counters

from contestants import SHAPES, line_up
from race import Results, arguments, count

DEPTHS = (6, 24, 48)
CONTESTANTS = ("pre@compiled", "siamese@compiled", "siamese:form=hybrid_pre@compiled", "llama@layers", "llama@whole")


def first_steps(contestant: str, blocks: int) -> dict[str, float]:
    """Seconds of the first and of the third step in this process, and the graphs that were compiled."""
    name, way = contestant.rsplit("@", 1)
    shape = replace(SHAPES["d256x8"], blocks=blocks, sequence=64, batch=1)
    (turn,) = line_up([name], shape, [way]).values()
    times = []
    for _ in range(3):
        began = time.perf_counter()
        turn()
        times.append(time.perf_counter() - began)
    used = os.times()
    processor = used.user + used.system + used.children_user + used.children_system
    return {
        "first": times[0],
        "third": times[2],
        "graphs": counters["stats"]["unique_graphs"],
        "processor_of_all": processor,
    }


def measured(contestant: str, blocks: int, threads: int) -> dict[str, float]:
    """The same of a fresh process with an empty cache."""
    command = [sys.executable, __file__, "--one", contestant, "--depths", str(blocks), "--threads", str(threads)]
    with tempfile.TemporaryDirectory() as cache:
        environment = {**os.environ, "TORCHINDUCTOR_CACHE_DIR": cache}
        done = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True, env=environment)
    figures = json.loads(done.stdout.splitlines()[-1])
    print(f"{contestant}, {blocks} blocks: {figures}", flush=True)
    return figures


def main() -> int:
    parser = arguments(__doc__, "compile_time", rounds=3)
    parser.add_argument("--contestants", nargs="+", default=list(CONTESTANTS), choices=list(CONTESTANTS))
    parser.add_argument("--depths", nargs="+", type=count, default=list(DEPTHS))
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.one:
        torch.set_num_threads(args.threads)
        print(json.dumps(first_steps(args.one, args.depths[0])))
        return 0
    results = Results(parser, args)
    for number in range(1 if args.quick else args.rounds):
        for contestant in args.contestants[:1] if args.quick else args.contestants:
            for blocks in (2,) if args.quick else args.depths:
                results.measure(
                    f"{contestant} {blocks} #{number}",
                    lambda contestant=contestant, blocks=blocks: measured(contestant, blocks, args.threads),  # type: ignore[misc]
                )
    return results.close()


if __name__ == "__main__":
    sys.exit(main())
