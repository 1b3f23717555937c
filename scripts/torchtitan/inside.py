"""In torchtitan's environment: layouts of docs/examples/torchtitan, one after the other in one world.

The last line printed is what came of it, as JSON. ``fake``: every topology is built, sharded and given an optimiser on
8 fake ranks; nothing is computed. ``run``: a few steps in each layout of the processes there are, with their losses.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parent.parent.parent / "docs" / "examples" / "torchtitan"))

import cpu  # noqa: F401  # before anything else of torchtitan
import siamesenorm_titan as door
import torch
import torch.distributed as dist

from siamesenorm.residual import TOPOLOGIES

FAKE = {
    "fsdp8": {"data_parallel_shard_degree": 8},
    "hsdp2x4": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 4},
    "tp2 fsdp4": {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 4},
}
REAL = {
    1: {"one": {}},
    2: {
        "fsdp2": {"data_parallel_shard_degree": 2},
        "hsdp2x1": {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 1},
        "tp2": {"tensor_parallel_degree": 2, "data_parallel_shard_degree": 1},
    },
}
SEVERAL = ("pre", "siamese", "hyper", "attnres")
"""Topologies that are trained."""
BATCH = 8


def trainer(topology: str, layout: dict[str, int], fake: bool = False) -> Any:
    """torchtitan's trainer of a topology in a layout."""
    config = door.small(topology)
    for name, value in layout.items():
        setattr(config.parallelism, name, value)
    size = int(os.environ["NGPU"]) if fake else int(os.environ["WORLD_SIZE"])
    config.training.local_batch_size = BATCH // (size // layout.get("tensor_parallel_degree", 1))
    config.comm.mode = "fake_backend" if fake else "default"
    config.dump_folder = os.environ["TITAN_OUT"]
    return config.build()


def steps(topology: str, layout: dict[str, int]) -> list[tuple[float, float]]:
    """Loss and gradient norm of every step."""
    made, found = trainer(topology, layout), []
    made.metrics_processor.log = lambda step, loss, largest, norm, **more: found.append((loss, norm))
    batches = made.batch_generator(made.dataloader)
    for step in range(1, made.config.training.steps + 1):
        made.step = step
        made.train_step(batches)
    made.close()
    return found


def main(kind: str) -> dict[str, Any]:
    """What was asked for."""
    if kind == "fake":
        built: dict[str, Any] = {}
        for name, layout in FAKE.items():
            for topology in TOPOLOGIES:
                made = trainer(topology, layout, fake=True)
                local = sum(
                    (p.to_local() if hasattr(p, "to_local") else p).numel() for p in made.model_parts[0].parameters()
                )
                built.setdefault(name, {})[topology] = local
                made.close()
        return built
    size = int(os.environ["WORLD_SIZE"])
    return {name: {t: steps(t, layout) for t in SEVERAL} for name, layout in REAL[size].items()}


if __name__ == "__main__":
    torch.manual_seed(0)
    result = main(sys.argv[1])
    if int(os.environ.get("RANK", 0)) == 0:
        print(json.dumps(result), flush=True)
    if dist.is_initialized():
        dist.destroy_process_group()
