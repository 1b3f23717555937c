"""``siamesenorm recipes``: what there is to train, and every field of one with its meaning."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from siamesenorm.commands.completion import complete_recipe
from siamesenorm.commands.options import Json, Overrides

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from siamesenorm.train.config import RunConfig

HOW = "~"
"""What stands before fields that may change on resume."""


def recipes(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME",
            help="Show this one, a name or a YAML file; without it, all are listed.",
            autocompletion=complete_recipe,
        ),
    ] = None,
    overrides: Overrides = None,
    as_yaml: Annotated[bool, typer.Option("--yaml", help="Print it as a recipe of your own.")] = False,
    as_json: Json = False,
) -> None:
    """List the training recipes, or show one with every field, its meaning and what it allows."""
    from rich.console import Console

    from siamesenorm.train.recipes import recipe_names, resolve
    from siamesenorm.train.yaml import write_yaml

    if name is None:
        resolved = {name: resolve(name) for name in recipe_names()}
        if as_json:
            typer.echo(json.dumps({name: config.as_dict() for name, config in resolved.items()}, indent=2))
        else:
            show_table(Console(), resolved)
        return
    config = resolve(name, overrides or [])
    if as_json:
        typer.echo(json.dumps(config.as_dict(), indent=2))
    elif as_yaml:
        typer.echo(write_yaml(config.as_dict()), nl=False)
    else:
        show_one(Console(), name, config)


def show_table(console: Console, resolved: dict[str, RunConfig]) -> None:
    """One row a recipe, task by task."""
    from rich.text import Text

    from siamesenorm.tasks import TASKS
    from siamesenorm.terminal import rows_table

    widest = max(map(len, resolved))
    for task in TASKS:
        table = rows_table()
        table.add_column(style="bold cyan", no_wrap=True, min_width=widest)
        table.add_column(no_wrap=True, justify="right", min_width=len("400,000 steps"))
        table.add_column(style="dim")
        for name, config in resolved.items():
            if config.task == task:
                table.add_row(name, length(config), Text(config.about))
        console.print(Text(task, style="bold"))
        console.print(table)
        console.print()
    notes = (
        "All fields of one: siamesenorm recipes NAME\n"
        "Train one: siamesenorm train NAME topology=pre lr=3e-3\n"
        "A recipe of your own: siamesenorm recipes NAME --yaml > mine.yaml"
    )
    console.print(Text(notes, style="dim"))


def length(config: RunConfig) -> str:
    """How long a recipe trains: steps, or epochs of data that are not known yet."""
    return f"{config.steps:,} steps" if config.train.epochs is None else f"{config.train.epochs:g} epochs"


def show_one(console: Console, name: str, config: RunConfig) -> None:
    """Every field, section by section."""
    from rich.text import Text

    from siamesenorm.terminal import rows_table
    from siamesenorm.train.fields import NamedField, describe_allowed, fields_of

    def rows(fields: list[NamedField], values: dict[str, Any], prefix: str) -> Table:
        grid = rows_table()
        grid.add_column(no_wrap=True, width=1, style="dim")
        grid.add_column(no_wrap=True)
        grid.add_column(overflow="fold", max_width=28)
        grid.add_column(overflow="fold", ratio=1)
        for field in fields:
            value: Any = values
            for part in field.path.removeprefix(prefix).split("."):
                value = value.get(part) if isinstance(value, dict) else None
            about = Text.assemble(field.info.description or "", (f" ({describe_allowed(field)})", "dim"))
            grid.add_row(Text(HOW if field.how else ""), Text(field.path, style="cyan"), Text(plain(value)), about)
        return grid

    values, fields = config.as_dict(), list(fields_of(type(config)))
    console.print(Text.assemble((name, "bold cyan"), "  ", config.about))
    console.print(Text(f"{length(config)} of {config.train.batch_size:,} samples", style="dim"))
    console.print(Text(f"{HOW} says how a run is computed and decides no loss: it may change on resume", style="dim"))
    for section in (field for field in fields if field.section is not None and "." not in field.path):
        inner = [f for f in fields if f.path.startswith(f"{section.path}.") and f.section is None]
        if not isinstance(values[section.path], dict):
            continue
        console.print(Text.assemble("\n", (section.path, "bold"), "  ", (section.info.description or "", "dim")))
        console.print(rows(inner, values[section.path], f"{section.path}."))


def plain(value: Any) -> str:
    """A value as it is written in an override."""
    if isinstance(value, float):
        return f"{value:g}"
    words = {True: "true", False: "false"}
    if value is None or isinstance(value, bool):
        return "null" if value is None else words[value]
    return json.dumps(value) if isinstance(value, (list, dict)) else str(value)
