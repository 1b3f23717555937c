"""``siamesenorm evaluate RUN``: a run's own evaluation again, on all its held-out data, with details by class."""

from __future__ import annotations

import shlex
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.console import Console

    from siamesenorm.tasks.confusion import Confusion
    from siamesenorm.train.inference import Inference

MOST_COLUMNS = 16
"""Classes up to which the whole confusion table is shown."""


def evaluate_run(console: Console, run: Path, output: Path | None, place: Inference, spread: bool = False) -> None:
    """Measure the model of a run as the run itself does, show it, and write it where asked.

    spread: each process holds a part of the model only.
    """
    import torch

    from siamesenorm.data.atomic import write_json
    from siamesenorm.tasks import find_task
    from siamesenorm.tasks.classification import ClassificationTask
    from siamesenorm.train.folder import plain_numbers
    from siamesenorm.train.stored import Stored, open_stored
    from siamesenorm.train.trained import open_trained

    trained = open_stored(run) if spread and place.world.size > 1 else open_trained(run)
    task = find_task(trained.config.task).for_evaluation(trained.config)
    model = place.spread(trained) if isinstance(trained, Stored) else place.ready(trained.model)
    world = place.world
    with torch.no_grad(), place.autocast():
        metrics = task.evaluate(
            model,
            rank=world.data_rank,
            world_size=world.data_size,
            average=world.mean,
            final=True,
            gather=world.gather_data,
        )
    if not place.is_main:
        return
    confusion = task.confusion if isinstance(task, ClassificationTask) else None
    show_metrics(console, metrics)
    sizes = task.held_out_sizes()
    console.print(f"measured on {' and '.join(f'{size:,} {of}' for of, size in sizes.items())}", style="dim")
    if confusion is not None:
        show_confusion(console, confusion)
    if output is not None:
        result: dict[str, Any] = {
            "command": shlex.join(["siamesenorm", *sys.argv[1:]]),
            "run": str(run),
            "step": trained.step,
            "metrics": plain_numbers(metrics),
            "held_out": sizes,
            "settings": {
                "device": str(place.device),
                "precision": place.precision,
                "processes": world.size,
            },
        }
        if confusion is not None:
            result |= {"classes": confusion.as_dict(), "confusion": confusion.counts.astype(int).tolist()}
        write_json(output, result)
        console.print(f"[dim]written to {output}[/dim]")


def show_metrics(console: Console, metrics: dict[str, float]) -> None:
    """One row a number."""
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, show_header=False, pad_edge=False, padding=(0, 2, 0, 0))
    table.add_column(style="bold cyan")
    table.add_column(justify="right")
    for name, value in metrics.items():
        table.add_row(Text(name), f"{value:.4f}")
    console.print(table)


def show_confusion(console: Console, confusion: Confusion) -> None:
    """Accuracy by class with the whole table where it is narrow, else the worst classes; then what is mixed up most."""
    from rich.table import Table
    from rich.text import Text

    names, whole = confusion.class_names, len(confusion.class_names) <= MOST_COLUMNS
    table = Table(box=None, header_style="bold", pad_edge=False, padding=(0, 1, 0, 0))
    table.add_column("class", style="bold cyan", no_wrap=True)
    table.add_column("accuracy", justify="right")
    table.add_column("images", justify="right")
    for number in range(len(names) if whole else 0):
        table.add_column(str(number), justify="right", style="dim")
    shares = confusion.by_class()
    rows = list(enumerate(shares.items()))
    if not whole:
        rows = sorted(rows, key=lambda row: 2.0 if row[1][1] is None else row[1][1])[:MOST_COLUMNS]
    for number, (name, share) in rows:
        counts = confusion.counts[number]
        cells = [
            Text("·" if not count else f"{int(count)}", style="green" if column == number else "red" if count else "")
            for column, count in enumerate(counts if whole else ())
        ]
        title = f"{number} {name}" if name != str(number) else name
        table.add_row(Text(title), "–" if share is None else f"{share:.1%}", f"{int(counts.sum())}", *cells)
    heading = "rows: true class; columns: what it was taken for" if whole else "the classes told worst"
    console.print(Text(f"\n{heading}", style="dim"))
    console.print(table)
    if mistakes := confusion.mistakes(5):
        told = ", ".join(f"{true} for {taken} ({count})" for true, taken, count in mistakes)
        console.print(Text(f"\nmost often mistaken: {told}", style="dim"))
