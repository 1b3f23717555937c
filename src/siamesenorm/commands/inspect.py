"""``siamesenorm inspect``: what goes on inside a trained model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from siamesenorm.commands.completion import complete_field
from siamesenorm.commands.options import Open

MOST_TOKENS = 2**20


def inspect(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|HF_DIR",
            help="Folder of a run of any task, or of an exported language model; with --coordinates a recipe.",
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Fields of the recipe to change (--coordinates).",
            autocompletion=complete_field,
        ),
    ] = None,
    text: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Text to read; by default what the run was validated on.")
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, max=MOST_TOKENS, help="Tokens of text to read, about.")] = 2048,
    removal: Annotated[bool, typer.Option(help="Measure the loss without each sublayer and block.")] = True,
    coordinates: Annotated[
        bool,
        typer.Option(
            "--coordinates",
            help="Train a recipe's model for a few steps in several sizes: do activations and their updates depend on "
            "width or depth?",
        ),
    ] = False,
    widths: Annotated[
        str, typer.Option(metavar="LIST", help="Multiples of the recipe's width (--coordinates); 1 for none.")
    ] = "1,2,4",
    depths: Annotated[
        str, typer.Option(metavar="LIST", help="Multiples of the recipe's blocks (--coordinates); 1 for none.")
    ] = "1,2,4",
    steps: Annotated[int, typer.Option(min=1, max=1000, help="Steps to train (--coordinates).")] = 5,
    seeds: Annotated[int, typer.Option(min=1, max=100, help="First weights to take the mean of (--coordinates).")] = 2,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Folder for inspection.json and inspection.html; by default inspection/ in the run, "
            "or runs/inspection-NAME for an exported model.",
        ),
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print JSON; files are written only where --out says so.")
    ] = False,
    show: Open = False,
) -> None:
    """Look inside a trained model: norms, gradients, who wrote what is read, logit lens, removals, activations."""
    from rich.console import Console

    from siamesenorm.errors import InspectionError

    for folder in (out, out.parent if out is not None else None):
        if folder is not None and folder.exists() and not folder.is_dir():
            raise InspectionError(f"--out: {str(folder)!r} is a file; it takes a folder")
    writes = not as_json or out is not None or show
    found: Any
    show_found: Any
    write: Any
    if coordinates:
        from siamesenorm.lab.inspection import coordinates_report as report

        if text is not None:
            raise InspectionError.refused("--text", text, when="with --coordinates, which reads the recipe's data")
        found = report.check_recipe(
            str(run),
            overrides or [],
            widths=widths,
            depths=depths,
            steps=steps,
            seeds=seeds,
            console=Console(stderr=True),
        )
        show_found, write, place = report.show, report.write_coordinates, report.default_folder(run)
    else:
        from siamesenorm.lab.inspection import looking, page, terminal

        if overrides:
            raise InspectionError(f"{overrides[0]!r} is not allowed; only --coordinates takes fields to change")
        for option, given in (("--widths", widths), ("--depths", depths)):
            if given != "1,2,4":
                raise InspectionError.refused(option, given, when="without --coordinates")
        found = looking.inspect_folder(run, text, tokens, removal=removal, console=Console(stderr=True))
        show_found, write, place = terminal.show, page.write_report, looking.default_folder(run)
    if as_json:
        typer.echo(found.to_json(), nl=False)
    else:
        show_found(Console(), found)
    if not writes:
        return
    try:
        written = write(found, out or place)
    except OSError as error:
        raise InspectionError.failed("--out", error.filename or out or place, "written", error) from None
    typer.echo("\n" + "\n".join(map(str, written)), err=as_json)
    if show:
        typer.launch(str(written[-1]))
