"""Whether the best learning rate of a small model is that of a wider or deeper one: standard against CompleteP.

    python benchmarks/lr_transfer.py                       # goes on where benchmarks/results/lr_transfer.json stands
    python benchmarks/lr_transfer.py --seeds 3             # more seeds
    python benchmarks/lr_transfer.py --draw                # docs/pictures/lr_transfer.png from the results, no runs
    python benchmarks/lr_transfer.py --quick --out /tmp/lr_transfer.json

Language models on the standard library's code, from width 32 and 2 blocks on, are trained at rates that double, each
with every seed. What is recorded is the held-out loss after the last step. A model of the base's size is the same in
both parametrisations and is trained once.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import sys
import time
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import torch

from siamesenorm.data.atomic import write_json
from siamesenorm.tasks import find_task
from siamesenorm.train.optimizer import build_optimizer, set_lr
from siamesenorm.train.parallel import clip_gradients
from siamesenorm.train.recipes import resolve
from siamesenorm.train.schedule import lr_factor

RESULTS = Path(__file__).parent / "results" / "lr_transfer.json"
PICTURE = Path(__file__).parents[1] / "docs" / "pictures" / "lr_transfer.png"
TOPOLOGIES, PARAMETRIZATIONS, OPTIMIZERS = ("pre", "siamese"), ("standard", "completep"), ("adamw", "muon")
WIDTH, DEPTH, HEAD = 32, 2, 16
SIZES = ((1, 1), (2, 1), (4, 1), (1, 2), (1, 4))
"""Multiples of width and depth."""
RATES = tuple(2.0**k * 1e-3 for k in range(1, 8))
STEPS, WARMUP, BATCH, LENGTH, SEQUENCES = 120, 12, 8, 64, 128


class Run(NamedTuple):
    """One training run."""

    topology: str
    optimizer: str
    parametrization: str
    width: int
    depth: int
    lr: float
    seed: int

    @property
    def key(self) -> str:
        """Its name among the results; that of a base does not depend on the parametrisation."""
        own = "both" if (self.width, self.depth) == (1, 1) else self.parametrization
        return f"{self.topology}/{self.optimizer}/{own}/{self.width}x{self.depth}/{self.lr:g}/{self.seed}"


def runs(seeds: int, quick: bool = False) -> Iterator[Run]:
    """All of them, seed by seed, so that what is there at any time is even."""
    for seed in range(seeds):
        for width, depth in SIZES[:2] if quick else SIZES:
            for topology in TOPOLOGIES[:1] if quick else TOPOLOGIES:
                for optimizer in OPTIMIZERS:
                    for parametrization in PARAMETRIZATIONS:
                        for lr in RATES[3:5] if quick else RATES:
                            yield Run(topology, optimizer, parametrization, width, depth, lr, seed)


def train(run: Run, steps: int) -> dict[str, Any]:
    """The held-out loss at the end, and what it took."""
    began = time.perf_counter()
    fields = {
        "model.dim": WIDTH * run.width,
        "model.heads": WIDTH * run.width // HEAD,
        "model.ffn_dim": 3 * WIDTH * run.width,
        "model.blocks": DEPTH * run.depth,
        "model.topology": run.topology,
        "model.parametrization": run.parametrization,
        "model.base_width": WIDTH,
        "model.base_depth": DEPTH,
        "optimizer.kind": run.optimizer,
        "optimizer.lr": run.lr,
        "schedule.warmup": WARMUP,
        "train.steps": STEPS,
        "train.batch_size": BATCH,
        "train.seed": run.seed,
        "data.sequence_length": LENGTH,
        "evaluation.sequences": SEQUENCES,
    }
    config = resolve("lm-tiny", [f"{name}={value}" for name, value in fields.items()])
    task = find_task(config.task)(config)
    model = task.build_model()
    optimizer = build_optimizer(model, config.optimizer)
    loader = task.loader(rank=0, world_size=1, sample=0, pin_memory=False)
    try:
        for step in range(1, steps + 1):
            set_lr(optimizer, run.lr * lr_factor(config.schedule, step, STEPS))
            optimizer.zero_grad(set_to_none=True)
            loss = task.loss(model, next(loader)).total
            if not math.isfinite(loss.item()):
                break
            loss.backward()
            clip_gradients(model, config.optimizer.clip or math.inf)
            optimizer.step()
        model.eval()
        with torch.no_grad():
            found = task.evaluate(model)["loss"]
    finally:
        loader.close()
    return {"loss": round(found, 5) if math.isfinite(found) else None, "seconds": round(time.perf_counter() - began, 2)}


class Best(NamedTuple):
    """Where the mean loss over seeds is least."""

    lr: float
    """By a parabola through the best rate and its neighbours, over log2(lr)."""
    loss: float
    at_base_lr: float
    """Loss at the rate that was best for the base, above the best."""


def curves(found: dict[str, Any]) -> dict[tuple[str, str, str, int, int], dict[float, list[float]]]:
    """Losses by setting and rate; one that is no number counts as the unigram plateau."""
    made: dict[tuple[str, str, str, int, int], dict[float, list[float]]] = defaultdict(lambda: defaultdict(list))
    for key, value in found.items():
        topology, optimizer, parametrization, size, lr, _ = key.split("/")
        width, depth = map(int, size.split("x"))
        for name in PARAMETRIZATIONS if parametrization == "both" else (parametrization,):
            loss = 3.1 if value["loss"] is None else value["loss"]
            made[topology, optimizer, name, width, depth][float(lr)].append(loss)
    return made


def best(curve: dict[float, list[float]], base_lr: float | None = None) -> Best:
    """The least mean loss of a setting."""
    means = {lr: statistics.mean(losses) for lr, losses in sorted(curve.items())}
    rates, losses = list(means), list(means.values())
    k = losses.index(min(losses))
    shift = 0.0
    if 0 < k < len(rates) - 1:
        left, middle, right = losses[k - 1 : k + 2]
        shift = 0.5 * (left - right) / (left - 2 * middle + right) if left - 2 * middle + right > 0 else 0.0
    above = 0.0 if base_lr is None else means.get(base_lr, math.nan) - losses[k]
    return Best(rates[k] * 2**shift, losses[k], above)


def tables(found: dict[str, Any]) -> list[dict[str, Any]]:
    """The best rate of every setting, and what the base's best rate costs there."""
    made, rows = curves(found), []
    for (topology, optimizer, parametrization, width, depth), curve in sorted(made.items()):
        base = made[topology, optimizer, parametrization, 1, 1]
        means = {lr: statistics.mean(losses) for lr, losses in base.items()}
        result = best(curve, min(means, key=lambda lr: means[lr]))
        rows.append(
            {
                "topology": topology,
                "optimizer": optimizer,
                "parametrization": parametrization,
                "width": width,
                "depth": depth,
                "best_lr": round(result.lr, 5),
                "loss": round(result.loss, 4),
                "above_best_at_base_lr": round(result.at_base_lr, 4),
                "seeds": min(map(len, curve.values())),
            }
        )
    return rows


def draw(found: dict[str, Any], file: Path) -> None:
    """Loss by rate: a column a topology and optimiser, rows by parametrisation and by what grows; a line a size."""
    from matplotlib.figure import Figure

    made = curves(found)
    columns = [(topology, optimizer) for topology in TOPOLOGIES for optimizer in OPTIMIZERS]
    rows = [(direction, name) for direction in ("width", "depth") for name in PARAMETRIZATIONS]
    figure = Figure(figsize=(3.1 * len(columns), 2.5 * len(rows)), layout="constrained")
    axes = figure.subplots(len(rows), len(columns), sharex=True, sharey=True, squeeze=False)
    for row, (direction, name) in enumerate(rows):
        for column, (topology, optimizer) in enumerate(columns):
            ax = axes[row][column]
            for multiple, colour in ((1, "#9ecae1"), (2, "#4292c6"), (4, "#08306b")):
                size = (multiple, 1) if direction == "width" else (1, multiple)
                curve = made.get((topology, optimizer, name, *size))
                if not curve:
                    continue
                rates = sorted(curve)
                means = [statistics.mean(curve[lr]) for lr in rates]
                ax.plot(rates, means, color=colour, label=f"{direction} × {multiple}")
                ax.fill_between(
                    rates, [min(curve[lr]) for lr in rates], [max(curve[lr]) for lr in rates], color=colour, alpha=0.2
                )
                top = best(curve)
                ax.plot([top.lr], [top.loss], "o", color=colour, markersize=5)
            ax.set_xscale("log", base=2)
            ax.grid(alpha=0.2)
            if row == 0:
                ax.set_title(f"{topology}, {optimizer}")
            if column == 0:
                ax.set_ylabel(f"{name}\nheld-out loss")
                ax.legend(frameon=False, fontsize=8)
            if row == len(rows) - 1:
                ax.set_xlabel("learning rate")
    losses = [statistics.mean(v) for curve in made.values() for v in curve.values()]
    axes[0][0].set_ylim(min(losses) - 0.03, min(max(losses) + 0.03, min(losses) + 1.2))
    file.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(file, dpi=110)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--out", type=Path, default=RESULTS)
    parser.add_argument("--picture", type=Path, help="where the plot goes; default: docs/pictures, none with --quick")
    parser.add_argument("--draw", action="store_true", help="draw what is there, train nothing")
    parser.add_argument("--quick", action="store_true", help="a few runs of three steps")
    args = parser.parse_args()
    torch.set_num_threads(1)
    setting = {
        "recipe": "lm-tiny",
        "base": {"dim": WIDTH, "blocks": DEPTH, "head_dim": HEAD, "ffn_dim": 3 * WIDTH},
        "steps": 3 if args.quick else STEPS,
        "warmup": WARMUP,
        "batch_size": BATCH,
        "sequence_length": LENGTH,
        "rates": list(RATES),
    }
    kept = json.loads(args.out.read_text()) if args.out.is_file() else {"setting": setting, "runs": {}}
    if kept["setting"] != setting:
        parser.error(f"{args.out} holds runs of another setting; take another --out")
    wanted = {} if args.draw else {run.key: run for run in runs(1 if args.quick else args.seeds, args.quick)}
    missing = {key: run for key, run in wanted.items() if key not in kept["runs"]}
    for number, (key, run) in enumerate(missing.items(), start=1):
        kept["runs"][key] = train(run, setting["steps"])  # type: ignore[arg-type]
        write_json(args.out, kept)
        print(f"{number}/{len(missing)} {key} {kept['runs'][key]}", flush=True)
    rows = tables(kept["runs"])
    write_json(args.out, {**kept, "best": rows})
    for row in rows:
        print(*(f"{name}={value}" for name, value in row.items()))
    picture = args.picture or (None if args.quick else PICTURE)
    if picture is not None:
        draw(kept["runs"], picture)
        print(picture)
    return 0


if __name__ == "__main__":
    sys.exit(main())
