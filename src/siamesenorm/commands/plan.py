"""``siamesenorm plan``: which layouts of a run fit into so many GPUs, and what a step would take."""

from __future__ import annotations

import json
from dataclasses import asdict
from typing import TYPE_CHECKING, Annotated

import typer

from siamesenorm.commands.completion import complete_topology
from siamesenorm.commands.options import Json, Overrides, Recipe

if TYPE_CHECKING:
    from collections.abc import Callable

    from rich.console import Console

    from siamesenorm.train.planning.plan import LayoutChoice, Plan

GIB = 2**30
WIDE = 110
"""Characters of a line that all columns take."""


def plan(
    recipe: Recipe,
    overrides: Overrides = None,
    gpus: Annotated[int, typer.Option(help="How many, 1 to 4096.")] = 8,
    gpu: Annotated[str, typer.Option(help="Which; a wrong name lists all.")] = "h100",
    topology: Annotated[
        str | None,
        typer.Option(help="Plan with this topology instead of the recipe's.", autocompletion=complete_topology),
    ] = None,
    machine: Annotated[int, typer.Option(min=1, max=4096, help="GPUs in one machine, joined by fast links.")] = 8,
    assume: Annotated[
        list[str] | None,
        typer.Option(metavar="NAME=SHARE", help="Change an assumption, such as matmul=0.5; may be repeated."),
    ] = None,
    show: Annotated[int, typer.Option(min=1, max=1000, help="Layouts to show.")] = 12,
    as_json: Json = False,
) -> None:
    """Say which layouts of a run fit into so many GPUs, how long a step would take there, and what to type.

    Counted on the real model without values; no data are opened and nothing runs. Times are estimates from data sheets:
    none was confirmed on a GPU. Exit codes: 0 a layout fits, 1 none does, 2 bad input.
    """
    from rich.console import Console

    from siamesenorm.train.planning.hardware import assumptions, find_gpu
    from siamesenorm.train.planning.plan import best_of_kinds, command, make_plan
    from siamesenorm.train.recipes import resolve

    changes = [*(overrides or []), *([] if topology is None else [f"topology={topology}"])]
    found = make_plan(resolve(recipe, changes), gpus, find_gpu(gpu, machine), assumptions(assume or []))
    shown = list(best_of_kinds(found.choices, show))
    to_type = command(found, found.choices[0], recipe, changes) if found.choices else None
    if as_json:
        typer.echo(json.dumps(as_data(found, shown, to_type), indent=2))
    else:
        console = Console()
        if shown:
            show_table(console, found, shown)
        show_words(console, found)
        typer.echo(found.verdict())
        if to_type is not None:
            typer.echo(to_type)
    if not found.choices:
        raise typer.Exit(1)


def as_data(found: Plan, shown: list[LayoutChoice], to_type: str | None) -> dict[str, object]:
    """A plan as plain data; sizes in bytes, times in seconds."""
    config, given, nearest = found.config, found.given, found.too_large
    return {
        "gpus": found.gpus,
        "gpu": asdict(found.gpu),
        "assumptions": asdict(found.assumed),
        "parameters": found.parameters,
        "verdict": found.verdict(),
        "command": to_type,
        "layouts": [choice.as_json(config) for choice in shown],
        "as_configured": None if given is None else given.as_json(config),
        "nearest": None if nearest is None else nearest.as_json(config),
        "refused": found.refused,
    }


def show_table(console: Console, found: Plan, shown: list[LayoutChoice]) -> None:
    """One row a layout; memory in GiB; on a narrow terminal fewer columns."""
    from siamesenorm.terminal import plain_table
    from siamesenorm.train.planning.plan import seconds

    columns: dict[str, Callable[[LayoutChoice], str]] = {
        "micro": lambda choice: str(choice.layout.micro_batch),
        "parts": lambda choice: str(choice.layout.parts(found.config.train.batch_size)),
        "recompute": lambda choice: choice.layout.checkpointing,
        "weights": lambda choice: f"{choice.need.weights / GIB:.1f}",
        "grads": lambda choice: f"{choice.need.gradients / GIB:.1f}",
        "optim": lambda choice: f"{choice.need.optimizer / GIB:.1f}",
        "state": lambda choice: f"{choice.need.state / GIB:.1f}",
        "activ": lambda choice: f"{choice.need.activations / GIB:.1f}",
        "peak": lambda choice: f"{choice.need.peak / GIB:.1f}",
        "step": lambda choice: seconds(choice.time.seconds),
        "sent": lambda choice: f"{choice.sent.all / GIB:.1f}",
        "MFU": lambda choice: f"{choice.utilisation:.0%}",
    }
    left_out = ("parts", "weights", "grads", "optim", "sent") if console.width < WIDE else ("state",)
    table = plain_table()
    table.add_column("layout", style="bold cyan")  # wraps where there is no room: no figure is cut
    for column in columns:
        if column not in left_out:
            table.add_column(column, no_wrap=True, justify="right")
    for choice in shown:
        table.add_row(choice.layout.name, *(cell(choice) for name, cell in columns.items() if name not in left_out))
    console.print(table)


def show_words(console: Console, found: Plan) -> None:
    """What the figures mean and stand on."""
    from rich.text import Text

    from siamesenorm.train.planning.hardware import gib
    from siamesenorm.train.planning.plan import describe

    gpu = found.gpu
    lines = [
        "memory and bytes sent: GiB of one GPU; state: weights, gradients and optimiser; peak: the fullest moment of a "
        "step; parts: of a GPU's share of a batch",
        f"{gpu.name}: {gpu.flops / 1e12:,.0f} TFLOP/s, {gpu.memory / 1e9:.0f} GB at {gpu.bandwidth / 1e9:,.0f} GB/s, "
        f"{gpu.link / 1e9:.0f} GB/s between the {gpu.machine} of a machine, {gpu.network / 1e9:.3g} GB/s beyond "
        f"({gpu.source})",
        found.assumed.sentence(),
        *(f"not possible: {kind}: {why}" for kind, why in found.refused.items()),
    ]
    given = found.given
    if given is not None and not given.fits:
        lines.append(f"as configured it does not fit: {describe(given.layout)} needs {gib(given.need.peak)} a GPU")
    console.print(Text("\n" + "\n".join(lines), style="dim"))
