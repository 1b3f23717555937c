"""What the training engine costs over a bare PyTorch loop: whole steps, taken in turns by both in one process.

    python benchmarks/engine.py                     # writes benchmarks/results/engine.json

The bare loop is what one writes first: a batch from a tensor of tokens, forward, backward, clipping, a learning
rate, AdamW, the loss as a number. The engine does the same step with everything around it: loader, schedule,
divergence monitor, metrics.jsonl, tracker, checkpoints' bookkeeping. Both train the same model from the same weights.
Every round times a few steps of each, in changing order; the median over the rounds of (engine / bare) is reported
with its quartiles, in wall time and in CPU time, which other programs on the machine disturb less.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

from siamesenorm import __version__
from siamesenorm.data import embedded_tokens
from siamesenorm.models.lm import LanguageModel, LMConfig
from siamesenorm.tasks import find_task
from siamesenorm.train.config import RunConfig
from siamesenorm.train.display import Display
from siamesenorm.train.distributed import World
from siamesenorm.train.engine import Engine
from siamesenorm.train.folder import RunFolder
from siamesenorm.train.loop import Loop
from siamesenorm.train.progress import RunProgress
from siamesenorm.train.recipes import resolve
from siamesenorm.train.speed import Peak

RESULT = Path(__file__).parent / "results" / "engine.json"
SHAPES = {
    "lm-tiny (d64x12)": [],
    "d256x4": ["dim=256", "blocks=4", "heads=4", "ffn_dim=704", "sequence_length=64", "train.batch_size=8"],
}
LIMIT = 1.03


def bare_loop(config: RunConfig) -> Callable[[], None]:
    """Steps of a loop without an engine."""
    assert isinstance(config.model, LMConfig)
    length, rows = config.sample_tokens, config.train.batch_size
    corpus = embedded_tokens("python-docs")
    tokens = torch.from_numpy(corpus.read(0, len(corpus)).astype("int64"))
    model = LanguageModel(config.model, seed=0).train()
    matrices = [p for p in model.parameters() if p.dim() >= 2]
    vectors = [p for p in model.parameters() if p.dim() < 2]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), fused=True)

    def step() -> None:
        starts = torch.randint(len(tokens) - length - 1, (rows,)).tolist()
        inputs = torch.stack([tokens[start : start + length] for start in starts])
        labels = torch.stack([tokens[start + 1 : start + length + 1] for start in starts])
        optimizer.zero_grad(set_to_none=True)
        loss = model(inputs, labels=labels).loss
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        for group in optimizer.param_groups:
            group["lr"] = 1e-3
        optimizer.step()
        loss.item()

    return step


def engine_loop(config: RunConfig, folder: Path) -> tuple[Callable[[], None], Loop]:
    """Steps of the engine, as `siamesenorm train` takes them."""
    run = RunFolder(folder)
    run.begin(config, "auto")
    loop = Loop(RunProgress(Engine(config, find_task(config.task)(config), World()), run, Display()))
    loop.progress.restore()
    loop.recorder.peak = Peak(1e12)

    def step() -> None:
        assert loop.take_step() is None

    return step, loop


def interleave(bare: Callable[[], None], engine: Callable[[], None], rounds: int, steps: int) -> dict[str, Any]:
    """Ratios engine / bare, round by round."""
    for warm in (bare, engine):
        for _ in range(3):
            warm()
    walls: list[tuple[float, float]] = []
    cpus: list[tuple[float, float]] = []
    for number in range(rounds):
        times: dict[str, tuple[float, float]] = {}
        order = [("bare", bare), ("engine", engine)]
        for name, step in order if number % 2 else reversed(order):
            wall, cpu = time.perf_counter(), time.process_time()
            for _ in range(steps):
                step()
            times[name] = (time.perf_counter() - wall, time.process_time() - cpu)
        walls.append((times["bare"][0], times["engine"][0]))
        cpus.append((times["bare"][1], times["engine"][1]))
    return {"wall": _ratio(walls, steps), "cpu": _ratio(cpus, steps)}


def _ratio(pairs: list[tuple[float, float]], steps: int) -> dict[str, Any]:
    low, middle, high = statistics.quantiles([engine / bare for bare, engine in pairs], n=4)
    return {
        "ratio": middle,
        "quartiles": [low, high],
        "ratio_of_minima": min(engine for _, engine in pairs) / min(bare for bare, _ in pairs),
        "bare_milliseconds": 1e3 * statistics.median(bare for bare, _ in pairs) / steps,
        "engine_milliseconds": 1e3 * statistics.median(engine for _, engine in pairs) / steps,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=50)
    parser.add_argument("--steps", type=int, default=1, help="steps of each contestant in a round")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path, default=RESULT)
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    report: dict[str, Any] = {
        "command": " ".join(["python", "benchmarks/engine.py", *sys.argv[1:]]),
        "versions": {"siamesenorm": __version__, "torch": torch.__version__, "python": platform.python_version()},
        "threads": args.threads,
        "rounds": args.rounds,
        "steps_a_round": args.steps,
        "limit": LIMIT,
        "shapes": {},
    }
    fixed = ["data.train=python-docs", "steps=100000", "evaluation.every=null", "checkpoint.every=null", "lr=1e-3"]
    for name, shape in SHAPES.items():
        config = resolve("lm-tiny", [*fixed, "tensorboard=false", "plateau=null", *shape])
        with tempfile.TemporaryDirectory() as folder:
            engine, loop = engine_loop(config, Path(folder))
            result = interleave(bare_loop(config), engine, args.rounds, args.steps)
            loop.progress.close()
            loop.engine.close()
        report["shapes"][name] = result
        for kind, row in result.items():
            print(
                f"{name:18s} {kind:5s} engine / bare {row['ratio']:.3f} "
                f"({row['quartiles'][0]:.3f}..{row['quartiles'][1]:.3f}), minima {row['ratio_of_minima']:.3f}, "
                f"{row['bare_milliseconds']:.1f} -> {row['engine_milliseconds']:.1f} ms per step"
            )
    args.out.parent.mkdir(parents=True, exist_ok=True)
    args.out.write_text(json.dumps(report, indent=1) + "\n")
    print(args.out)


if __name__ == "__main__":
    main()
