"""DeiT-tiny against timm's, and siamese against pre: forward and backward, and what autograd keeps.

    python benchmarks/vision.py                     # writes benchmarks/results/vision.json
    python benchmarks/vision.py --batch 8 --rounds 5 --contestants pre siamese

All contestants are in training mode in float32, without stochastic depth. They take turns in one process, and the
median over the rounds of (contestant / pre) is reported with its quartiles; above 1 is slower than our Pre-Norm.
`timm` is timm's own deit_tiny_patch16_224; its weights are ours, so that both compute the same. `@unfused` is the
plain read and write that the fused step is tested against. Saved activations are the bytes of all distinct
storages that autograd keeps, parameters left out, counted with saved-tensor hooks.
"""

from __future__ import annotations

import argparse
import gc
import json
import platform
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import siamesenorm.interop.timm  # noqa: F401
from saved import saved_bytes
from siamesenorm import __version__
from siamesenorm.interop.official import to_official
from siamesenorm.models.vit import VisionTransformer, vit_preset

RESULT = Path(__file__).parent / "results" / "vision.json"
CONTESTANTS = ["timm", "pre", "siamese", "siamese@unfused"]


def make(contestant: str, size: str) -> nn.Module:
    """A model in training mode, the same weights for the same topology."""
    topology, _, tag = contestant.partition("@")
    config = vit_preset(f"deit-{size}", topology="pre" if topology == "timm" else topology, drop_path=0.0)
    model = VisionTransformer(config, seed=0, fused=tag != "unfused")
    if topology != "timm":
        return model
    import timm

    theirs: nn.Module = timm.create_model(f"deit_{size}_patch16_224")
    theirs.load_state_dict(to_official(model))
    return theirs.train()


def step_of(model: nn.Module, images: Tensor, labels: Tensor) -> Callable[[], None]:
    """Forward and backward."""

    def step() -> None:
        model.zero_grad(set_to_none=True)
        nn.functional.cross_entropy(model(images), labels).backward()

    return step


def interleave(steps: dict[str, Callable[[], None]], rounds: int, reference: str) -> dict[str, dict[str, Any]]:
    """Ratios to the reference, taking turns."""
    for step in steps.values():
        step()
    times: dict[str, list[float]] = {name: [] for name in steps}
    names = list(steps)
    for index in range(rounds):
        for name in names[index % len(names) :] + names[: index % len(names)]:
            start = time.perf_counter()
            steps[name]()
            times[name].append(time.perf_counter() - start)
    table = {}
    for name, values in times.items():
        ratios = [value / base for value, base in zip(values, times[reference], strict=True)]
        low, middle, high = statistics.quantiles(ratios, n=4)
        table[name] = {
            "ratio": middle,
            "quartiles": [low, high],
            "ratio_of_minima": min(values) / min(times[reference]),
            "milliseconds": 1e3 * statistics.median(values),
        }
    return table


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--contestants", nargs="+", default=CONTESTANTS)
    parser.add_argument("--size", default="tiny", choices=["tiny", "small", "base"])
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    if "pre" not in args.contestants:
        parser.error("--contestants: 'pre' must be among them, the others are compared with it")

    generator = torch.Generator().manual_seed(0)
    images = torch.randn(args.batch, 3, 224, 224, generator=generator)
    labels = torch.randint(1000, (args.batch,), generator=generator)
    models = {name: make(name, args.size) for name in args.contestants}
    gc.disable()  # a collection in the middle would be counted to whoever runs
    table = interleave({name: step_of(m, images, labels) for name, m in models.items()}, args.rounds, "pre")
    saved = {name: saved_bytes(model, images) for name, model in models.items()}
    print(f"deit-{args.size}, batch {args.batch}, 224 pixels, {torch.get_num_threads()} threads, ratios to pre")
    print(f"{'':24s} {'step':>6s} {'quartiles':>15s} {'minima':>6s} {'ms':>7s} {'saved':>6s}")
    for name, row in table.items():
        row |= {"saved_bytes": saved[name], "saved_ratio": saved[name] / saved["pre"]}
        low, high = row["quartiles"]
        print(
            f"{name:24s} {row['ratio']:6.3f} {f'{low:.3f}..{high:.3f}':>15s} {row['ratio_of_minima']:6.3f} "
            f"{row['milliseconds']:7.0f} {row['saved_ratio']:6.3f}"
        )
    import timm

    report = {
        "command": " ".join(["python", "benchmarks/vision.py", *sys.argv[1:]]),
        "versions": {
            "siamesenorm": __version__,
            "torch": torch.__version__,
            "timm": timm.__version__,
            "python": platform.python_version(),
        },
        "threads": torch.get_num_threads(),
        "model": f"deit-{args.size}",
        "batch": args.batch,
        "rounds": args.rounds,
        "contestants": table,
    }
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(f"\n{args.out}")


if __name__ == "__main__":
    main()
