"""Records of studies that were never run: numbers with an effect that is known, or with none."""

import numpy as np

from siamesenorm.lab.study.cells import cells_of
from siamesenorm.lab.study.plan import PlanFile, parse_plan
from siamesenorm.lab.study.record import Record
from siamesenorm.train.recipes import load_recipe

RECIPE = "lm-tiny"


def plan_values(**changes):
    """A small plan with one part, of three arms."""
    part = {"name": "first", "corpus": "code", "size": "small", "configurations": 4, "seeds": 6}
    if "configurations" in changes:
        part["configurations"] = changes.pop("configurations")
    return {
        "name": "planted",
        "recipe": RECIPE,
        "arms": {"pre": "pre", "siamese": "siamese", "post": "post"},
        "baseline": "pre",
        "corpora": {"code": {"set": {"data.train": ["python-code"]}}},
        "sizes": {"small": {"set": {"train.steps": 40}}},
        "search": {
            "space": {
                "optimizer.lr": {"low": 1e-3, "high": 1e-1},
                "schedule.warmup": {"choices": [0, 4]},
            }
        },
        "seeds": [1, 2, 3, 4, 5, 6],
        "parts": [part],
        **changes,
    }


def plan_file(**changes):
    values = plan_values(**changes)
    plan = parse_plan(values)
    return PlanFile(plan, b"", values, load_recipe(plan.recipe))


def record(cell, score, *, state="finished", seconds=4.0, parameters=150_000, spikes=0.0):
    """The record of a cell with a number, or None for one that diverged."""
    steps = cell.config.steps
    return Record(
        key=cell.key,
        cell=cell.title,
        corpus=cell.corpus,
        size=cell.size,
        optimizer=cell.optimizer,
        arm=cell.arm,
        topology=cell.topology,
        stage=cell.stage,
        number=cell.number,
        seed=cell.seed,
        lr=cell.lr,
        drawn=cell.drawn,
        factor=cell.factor,
        state=state if score is not None else "diverged",
        step=steps if score is not None else steps // 2,
        steps=steps,
        score=score,
        higher=False,
        evaluation={} if score is None else {"loss": score},
        chance=3.2,
        first_loss=5.5,
        curve=[],
        spikes=spikes,
        grad_tail=1.0,
        parameters=parameters,
        samples=steps * 16 * 64,
        step_seconds=0.1,
        processor_seconds=seconds,
        memory_bytes=1e6,
        plan="0" * 12,
        versions={},
        machine="one",
        data={},
        when="2026-01-01T00:00Z",
    )


def fill(file, score_of, records=None):
    """Records of all cells of all parts, search first; score_of: (cell) -> number or None."""
    records = {} if records is None else records
    for part in file.plan.parts:
        for _ in range(2):  # later cells come into being with the search's winner
            for cell in cells_of(file, part, records):
                if cell.key not in records:
                    records[cell.key] = record(cell, score_of(cell))
    return records


def noise(seed):
    return np.random.default_rng(seed)
