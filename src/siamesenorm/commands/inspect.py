"""``siamesenorm inspect``: what goes on inside a trained model."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Annotated

import typer

FOLDER = "inspection"
MOST_TOKENS = 2**20


def inspect(
    run: Annotated[
        Path,
        typer.Argument(
            metavar="RUN|HF_DIR",
            help="Folder of a run of any task, or of an exported language model.",
            show_default=False,
        ),
    ],
    text: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE", help="Text to read; by default what the run was validated on.", show_default=False
        ),
    ] = None,
    tokens: Annotated[int, typer.Option(min=2, max=MOST_TOKENS, help="Tokens of text to read, about.")] = 2048,
    removal: Annotated[bool, typer.Option(help="Measure the loss without each sublayer and block.")] = True,
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
    show: Annotated[bool, typer.Option("--open", help="Show the report in a browser.")] = False,
) -> None:
    """Look inside a trained model: norms, gradients, who wrote what is read, logit lens, removals, activations."""
    from rich.console import Console

    from siamesenorm.lab.inspection.errors import InspectionError
    from siamesenorm.lab.inspection.source import open_source
    from siamesenorm.lab.inspection.terminal import show as show_tables
    from siamesenorm.lab.looking import look_inside

    for folder in (out, out.parent if out is not None else None):
        if folder is not None and folder.exists() and not folder.is_dir():
            raise InspectionError(f"--out: {str(folder)!r} is a file; it takes a folder")
    writes = not as_json or out is not None or show
    if writes and importlib.util.find_spec("plotly") is None:
        raise InspectionError("--out: the page needs the package 'plotly'; pip install plotly, or take --json")
    source = open_source(run, text, tokens)
    found = look_inside(source, removal, Console(stderr=True))
    if as_json:
        typer.echo(found.to_json(), nl=False)
    else:
        show_tables(Console(), found)
    if not writes:
        return
    from siamesenorm.lab.inspection.report import write_report

    try:
        written = write_report(found, out or default_folder(run, str(source.facts["kind"])))
    except OSError as error:
        reason = error.strerror or error
        raise InspectionError(f"--out: {error.filename or out!s} cannot be written: {reason}") from None
    typer.echo("\n" + "\n".join(map(str, written)), err=as_json)
    if show:
        typer.launch(str(written[-1]))


def default_folder(run: Path, kind: str) -> Path:
    """Inside a run; beside other runs for an exported model, whose folder is left as it is."""
    return run / FOLDER if kind == "run" else Path("runs") / f"{FOLDER}-{run.resolve().name}"
