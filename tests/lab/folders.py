"""Run folders as training leaves them, written by hand: a grid's worth of results without a second of training."""

import json
from pathlib import Path
from typing import Any

from siamesenorm.lab.compare.grid import Cell
from siamesenorm.train.recipes import resolve
from siamesenorm.train.yaml import write_yaml

FACTS = {
    "versions": {"python": "3.11", "torch": "2.13"},
    "machine": {"system": "Linux", "processor": "one", "cores": 2},
    "command": "siamesenorm compare",
    "data": {"python-code": "ab" * 32},
    "chance_loss": 3.2,
    "processor_seconds": 20.0,
    "memory_bytes": 2**20,
}
SCORES = {
    ("pre", 1e-3): [2.50, 2.52, 2.48],
    ("pre", 1e-2): [2.10, 2.12, 2.09],
    ("siamese", 1e-3): [2.40, 2.42, 2.39],
    ("siamese", 1e-2): [2.00, 2.03, 1.98],
    ("post", 1e-3): [2.30, 2.33, 2.29],
    ("post", 1e-2): [None, 2.9, None],
}
"""Held-out losses of three seeds by topology and learning rate; None: diverged."""


def write_run(
    root: Path,
    topology: str = "pre",
    lr: float = 1e-2,
    seed: int = 0,
    loss: float | None = 2.0,
    *,
    state: str = "finished",
    overrides: tuple[str, ...] = (),
    name: str | None = None,
    facts: dict[str, Any] | None = None,
    losses: list[float] | None = None,
    evaluation: dict[str, float] | None = None,
    held_out: dict[str, int] | None = None,
    recipe: str = "lm-tiny",
) -> Path:
    """One run; its losses fall to where they end, unless given."""
    config = resolve(recipe, ["steps=40", "warmup=4", *overrides, f"topology={topology}", f"lr={lr!r}", f"seed={seed}"])
    folder = root / (name or Cell(config).name)
    folder.mkdir(parents=True)
    (folder / "config.yaml").write_text(write_yaml(config.as_dict()), encoding="utf-8")
    steps = 40 if state == "finished" else 20
    measured = {} if loss is None else {"loss": loss, "perplexity": 2.718**loss, **(evaluation or {})}
    status = {"state": state, "step": steps, "steps": 40, "loss": loss, "evaluation": measured, "message": state}
    status["held_out"] = {"tokens": 16384} if held_out is None else held_out
    (folder / "status.json").write_text(json.dumps(status), encoding="utf-8")
    losses = losses or [5.5 - (5.5 - (loss or 5.0)) * step / steps for step in range(1, steps + 1)]
    lines = [{"step": step, "loss": value, "seconds": 0.1} for step, value in enumerate(losses, start=1)]
    with open(folder / "metrics.jsonl", "w", encoding="utf-8") as file:
        file.writelines(json.dumps(line) + "\n" for line in lines)
    (folder / "cell.json").write_text(json.dumps(FACTS if facts is None else facts), encoding="utf-8")
    return folder


def write_grid(root: Path, scores: dict[tuple[str, float], list[float | None]]) -> list[Path]:
    """Runs by topology and learning rate, a number for every seed; None is a run that diverged."""
    return [
        write_run(root, topology, lr, seed, loss, state="finished" if loss is not None else "diverged")
        for (topology, lr), losses in scores.items()
        for seed, loss in enumerate(losses)
    ]
