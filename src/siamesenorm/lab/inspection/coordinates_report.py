"""A coordinate check of a recipe: how it is asked for, on the terminal, and on disk."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from rich.console import Console
from rich.text import Text

from siamesenorm.data.atomic import write_texts
from siamesenorm.errors import InspectionError
from siamesenorm.lab.compare.axes import parse_numbers
from siamesenorm.lab.drawing.page import Page
from siamesenorm.lab.inspection.coordinates import FLAT, Axis, Coordinates, check_coordinates
from siamesenorm.lab.inspection.figures import DASH, layout, trace
from siamesenorm.lab.inspection.terminal import number
from siamesenorm.models.stack import Stack
from siamesenorm.tasks import find_task
from siamesenorm.terminal import plain_table, progress_bar
from siamesenorm.train.provenance import command, machine_facts
from siamesenorm.train.recipes import resolve

JSON, HTML = "coordinates.json", "coordinates.html"
LARGEST = 64
"""Times as wide or deep."""


def check_recipe(
    recipe: str,
    overrides: Sequence[str] = (),
    *,
    widths: str = "1,2,4",
    depths: str = "1,2,4",
    steps: int = 5,
    seeds: int = 1,
    console: Console | None = None,
) -> Coordinates:
    """The check of a recipe's model, on its data, with its optimiser at the peak of its learning rate.

    widths, depths: multiples of the recipe's own, as the command line takes them.
    """
    wide, deep = parse_multiples(widths, "--widths"), parse_multiples(depths, "--depths")
    if max(len(wide), len(deep)) < 2:
        raise InspectionError.refused("--widths", widths, "one takes two sizes", when=f"with --depths {depths!r}")
    config = resolve(recipe, overrides)
    task = find_task(config.task)(config)
    model = task.build_model()
    if not isinstance(model, Stack):
        raise InspectionError.not_allowed("--coordinates", recipe, "recipes of models on a topology")
    with task.loader(rank=0, world_size=1, sample=0, pin_memory=False) as loader:
        batches = [next(loader) for _ in range(steps)]
    with progress_bar(console or Console(quiet=True), "models") as progress:
        found = check_coordinates(
            model,
            lambda model, batch: task.loss(model, dict(batch)).total,
            batches,
            config.optimizer,
            widths=wide,
            depths=deep,
            seeds=seeds,
            progress=progress,
        )
    facts = {"recipe": recipe, "overrides": list(overrides), "command": command(), **machine_facts()}
    return found.model_copy(update={"source": facts})


def parse_multiples(text: str, option: str) -> tuple[int, ...]:
    """``1,2,4``: whole numbers from 1, in order, each once."""
    found: tuple[int, ...] = parse_numbers([text], option, int)
    if any(not 1 <= multiple <= LARGEST for multiple in found) or list(found) != sorted(set(found)):
        raise InspectionError.not_allowed(option, text, f"rising whole numbers from 1 to {LARGEST}, such as 1,2,4")
    return found


def show(console: Console, found: Coordinates) -> None:
    """Slopes of every quantity, and the verdict."""
    console.print(
        Text.assemble((found.topology, "bold cyan"), f"  {found.parametrization}, {found.optimizer}, lr {found.lr:g}")
    )
    for axis in found.axes:
        table = plain_table()
        table.add_column(f"updates by {axis.direction}", no_wrap=True)
        for value in axis.values:
            table.add_column(str(value), justify="right", no_wrap=True)
        for name in ("size's slope", "update's"):
            table.add_column(name, justify="right", no_wrap=True)
        for each in axis.coordinates:
            steep = dict(each.steep)
            slopes = [
                Text(signed(slope), style="bold red" if what in steep else "")
                for what, slope in (("size", each.size_slope), ("update", each.update_slope))
            ]
            table.add_row(each.name, *map(number, each.updates), *slopes)
        console.print()
        console.print(table)
    console.print()
    for line in verdicts(found):
        console.print(Text(line), soft_wrap=True)


def signed(value: float | None) -> str:
    """A slope."""
    return "–" if value is None else f"{value:+.2f}"


def verdicts(found: Coordinates) -> Iterator[str]:
    """A sentence an axis."""
    for axis in found.axes:
        steepest = axis.steepest
        if steepest is None:
            yield f"flat over {axis.direction}: no slope beyond {FLAT:g}"
        else:
            yield f"not flat over {axis.direction}: the {steepest[0]} has slope {signed(steepest[1])}"


def figure(axis: Axis) -> dict[str, object]:
    """A line for the updates of every quantity and a dotted one for its size, on logarithmic axes."""
    data = []
    for color, each in enumerate(axis.coordinates):
        data.append(trace(f"{each.name} update", axis.values, each.updates, color))
        data.append(trace(each.name, axis.values, each.sizes, color, DASH))
    made = layout(axis.direction, "rms", len(axis.values) + 100, log=True)
    made["xaxis"] |= {"type": "log", "tickvals": list(axis.values), "ticktext": list(map(str, axis.values))}
    return {"data": data, "layout": made}


def make_page(found: Coordinates) -> Page:
    """The verdict, the plots, the numbers, and how to make it again."""
    page = Page(
        f"Coordinate check of {found.topology}",
        f"{found.parametrization}, {found.optimizer} at a learning rate of {found.lr:g}, {found.steps} steps.",
    )
    page.heading("At a glance")
    page.bullets(verdicts(found))
    for axis in found.axes:
        page.plot(
            axis.direction,
            f"Activations by {axis.direction}",
            f"Root mean square of what {found.steps} steps have changed and, dotted, of the activations themselves "
            f"before them, mean of {found.seeds} {'seeds' if found.seeds > 1 else 'seed'}. Level lines are flat.",
            figure(axis),
        )
    page.heading("Numbers")
    for axis in found.axes:
        page.table(
            [axis.direction, *map(str, axis.values), "slope", *(f"update at {v}" for v in axis.values), "its slope"],
            [
                [
                    each.name,
                    *map(number, each.sizes),
                    signed(each.size_slope),
                    *map(number, each.updates),
                    signed(each.update_slope),
                ]
                for each in axis.coordinates
            ],
            caption=f"By {axis.direction}. Slopes are those of logarithms: 0 is flat, 1 grows in proportion.",
        )
    page.heading("Make it again")
    page.details("Recipe, versions and machine", json.dumps(found.source, indent=1, ensure_ascii=False))
    return page


def default_folder(recipe: Path) -> Path:
    """Where the check of a recipe goes."""
    return Path("runs") / f"coordinates-{recipe.stem or recipe}"


def write_coordinates(found: Coordinates, folder: Path) -> list[Path]:
    """Write both files into a folder, each whole or not at all; their paths, the page's last."""
    return write_texts(folder, {JSON: found.to_json(), HTML: make_page(found).render()})
