"""``siamesenorm models``: the model presets with their costs."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Annotated, Any

import typer

from siamesenorm.commands.completion import complete_model, complete_topology
from siamesenorm.commands.options import Json

if TYPE_CHECKING:
    from rich.console import Console

WIDE = 120
"""Columns from which on the table has room for words."""


def models(
    name: Annotated[
        str | None,
        typer.Argument(
            metavar="NAME", help="Explain this one; without it, all are listed.", autocompletion=complete_model
        ),
    ] = None,
    topology: Annotated[
        str | None,
        typer.Option(help="Count with this topology instead of the preset's.", autocompletion=complete_topology),
    ] = None,
    as_json: Json = False,
) -> None:
    """List the model presets with their parameters, FLOPs and memory, or explain one."""
    from rich.console import Console

    from siamesenorm.errors import ConfigError
    from siamesenorm.models.families import FAMILIES
    from siamesenorm.residual import Residual

    changes = {} if topology is None else {"topology": topology}
    if topology is not None:
        Residual(topology, dim=2, blocks=1)  # a wrong name or option ends here, in one sentence
    known = [key for family in FAMILIES.values() for key in family.presets]
    if name is not None and name not in known:
        raise ConfigError.unknown_name("model", name, known)
    whole = name is not None or as_json  # the table does not show activations, which take the longest to count
    described = [describe(key, changes, activations=whole) for key in ([name] if name else known)]
    if as_json:
        typer.echo(json.dumps(described[0] if name else described, indent=2))
    elif name:
        show_one(Console(), described[0])
    else:
        show_table(Console(), described)


def describe(name: str, changes: dict[str, Any], *, activations: bool = True) -> dict[str, Any]:
    """A preset as plain data: its name, words about it, every field, every count; activations if asked for."""
    from siamesenorm.models.families import FAMILIES

    (family,) = (family for family in FAMILIES.values() if name in family.presets)
    preset = family.presets[name]
    config = preset.config.model_validate({**preset.config.model_dump(), **changes})
    return {
        "name": name,
        "family": family.name,
        "about": preset.about,
        "unit": family.unit,
        "config": config.model_dump(mode="json"),
        "counts": family.count(config).as_json(activations=activations),
    }


def show_table(console: Console, described: list[dict[str, Any]]) -> None:
    """One row a preset."""
    from rich.text import Text

    from siamesenorm.terminal import plain_table, with_unit

    headers = ("name", "shape", "parameters", "active", "FLOPs", "training state")
    table = plain_table(*headers, name="bold cyan", no_wrap=True)
    wide = console.width >= WIDE
    if wide:
        table.add_column("", no_wrap=True)
    for entry in described:
        config, counts = entry["config"], entry["counts"]
        table.add_row(
            entry["name"],
            f"{config['blocks']}×{config['dim']}",
            with_unit(counts["total"]),
            with_unit(counts["active"]),
            f"{flops(counts['flops_training'])}/{entry['unit']}",
            memory(counts["training_bytes"]),
            *([Text(entry["about"], style="dim")] if wide else []),
        )
    console.print(table)
    notes = (
        "FLOPs: forward and backward, of a token in the longest sequence or of an image.\n"
        "training state: weights, gradients and AdamW's moments in float32.\n"
        "More of one: siamesenorm models NAME"
    )
    console.print(Text(f"\n{notes}", style="dim"))


def show_one(console: Console, entry: dict[str, Any]) -> None:
    """Every field and every count of one preset."""
    from rich.text import Text

    from siamesenorm.models.families import FAMILIES
    from siamesenorm.terminal import rows_table

    unit, fields = entry["unit"], FAMILIES[entry["family"]].config.model_fields
    console.print(Text.assemble((entry["name"], "bold cyan"), "  ", entry["about"]), end="\n\n")
    console.print(
        rows_table(
            (Text(field, style="cyan"), Text(_plain(value)), Text(fields[field].description or "", style="dim"))
            for field, value in entry["config"].items()
        )
    )
    counts = entry["counts"]
    rows = {
        "parameters": f"{counts['total']:,}, of which {counts['active']:,} per {unit}",
        "embedding and head": f"{counts['embedding']:,}",
        "residual topology": f"{counts['topology']:,} ({100 * counts['topology'] / counts['total']:.3f} %), "
        f"{counts['topology_extra']:+,} against Pre-Norm",
        f"FLOPs per {unit}": f"{flops(counts['flops_forward'])} forward, "
        f"{flops(counts['flops_training'])} in training, {counts['length']} tokens",
        "memory, float32": f"{memory(counts['weight_bytes'])} weights, "
        f"{memory(counts['optimizer_bytes'])} AdamW's moments, {memory(counts['training_bytes'])} with gradients",
        "activations": f"about {memory(counts['activation_bytes'])} per {unit}",
    }
    console.print()
    console.print(rows_table((Text(title, style="dim"), Text(text)) for title, text in rows.items()))


def flops(number: float) -> str:
    """Three digits with giga, as FLOPs are spoken of."""
    from siamesenorm.terminal import with_unit

    return with_unit(number).replace("B", "G")


def memory(size: float) -> str:
    """Bytes in GiB, or in MiB where these are few."""
    return f"{size / 2**30:.2f} GiB" if size >= 2**27 else f"{size / 2**20:.2f} MiB"


def _plain(value: Any) -> str:
    if isinstance(value, dict):
        return ", ".join(f"{key} {item}" for key, item in value.items())
    return "–" if value is None else str(value)
