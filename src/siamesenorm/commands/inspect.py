"""``siamesenorm inspect``: what goes on inside a trained model."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from siamesenorm.commands.completion import complete_field
from siamesenorm.commands.options import Open

if TYPE_CHECKING:
    from siamesenorm.lab.inspection.coordinates import Coordinates

FOLDER = "inspection"
MOST_TOKENS = 2**20


def inspect(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|HF_DIR",
            help="Folder of a run of any task, or of an exported language model; with --coordinates a recipe.",
            show_default=False,
        ),
    ],
    overrides: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[KEY=VALUE]...",
            help="Fields of the recipe to change (--coordinates).",
            autocompletion=complete_field,
            show_default=False,
        ),
    ] = None,
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Text to read; by default what the run was validated on.", show_default=False
        ),
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
            show_default=False,
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
    if writes and importlib.util.find_spec("plotly") is None:
        raise InspectionError("--out: the page needs the package 'plotly'; pip install plotly, or take --json")
    found: Any
    show_found: Any
    write: Any
    if coordinates:
        from siamesenorm.lab.inspection import coordinates_report as report

        if text is not None:
            raise InspectionError(
                f"--text: {str(text)!r} is not allowed with --coordinates, which reads the recipe's data"
            )
        found = check(str(run), overrides or [], (widths, depths), steps, seeds)
        show_found, write, place = (
            report.show,
            report.write_coordinates,
            Path("runs") / f"coordinates-{run.stem or run}",
        )
    else:
        from siamesenorm.lab.inspection import looking, page, terminal
        from siamesenorm.lab.inspection.source import open_inspected

        if overrides:
            raise InspectionError(f"{overrides[0]!r} is not allowed; only --coordinates takes fields to change")
        for option, given in (("--widths", widths), ("--depths", depths)):
            if given != "1,2,4":
                raise InspectionError(f"{option}: {given!r} is not allowed without --coordinates")
        source = open_inspected(run, text, tokens)
        found = looking.look_inside(source, removal, Console(stderr=True))
        show_found, write, place = terminal.show, page.write_report, default_folder(run, str(source.facts["kind"]))
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


def check(recipe: str, overrides: list[str], multiples: tuple[str, str], steps: int, seeds: int) -> Coordinates:
    """The coordinate check of a recipe, with its progress on the terminal."""
    from rich.console import Console

    from siamesenorm.errors import InspectionError
    from siamesenorm.lab.inspection.coordinates_report import check_recipe, parse_multiples
    from siamesenorm.terminal import progress_bar

    widths, depths = (parse_multiples(*each) for each in zip(multiples, ("--widths", "--depths"), strict=True))
    if max(len(widths), len(depths)) < 2:
        raise InspectionError(
            f"--widths: {multiples[0]!r} is not allowed with --depths {multiples[1]!r}; one takes two sizes"
        )
    with progress_bar(Console(stderr=True), "models") as progress:
        return check_recipe(
            recipe, overrides, widths=widths, depths=depths, steps=steps, seeds=seeds, progress=progress
        )


def default_folder(run: Path, kind: str) -> Path:
    """Inside a run; beside other runs for an exported model, whose folder is left as it is."""
    return run / FOLDER if kind == "run" else Path("runs") / f"{FOLDER}-{run.resolve().name}"
