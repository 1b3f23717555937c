"""Arguments and options that several commands have, each defined once."""

from __future__ import annotations

from typing import Annotated

import typer

from siamesenorm.commands.completion import complete_recipe

DTYPES = ("float32", "bfloat16", "float16")

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Open = Annotated[bool, typer.Option("--open", help="Show the report in a browser.")]
Recipe = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A name that `siamesenorm recipes` lists, a YAML file, or the folder of a run.",
        autocompletion=complete_recipe,
        show_default=False,
    ),
]
RemoteCode = Annotated[bool, typer.Option(help="Put the code beside it that transformers loads without this package.")]
Jobs = Annotated[
    int | None, typer.Option(min=1, help="Cells at a time; by default one per GPU or core.", show_default=False)
]
Engine = Annotated[
    str, typer.Option(help="Where cells run: local, or ray for a Ray cluster (extra: ray).", metavar="NAME")
]
Metric = Annotated[str | None, typer.Option(help="Held-out number to compare by.", metavar="NAME", show_default="loss")]
Baseline = Annotated[
    str | None,
    typer.Option(help="Topology to compare the others with.", metavar="NAME", show_default="the first one, or pre"),
]
Figures = Annotated[
    str | None,
    typer.Option(
        help="Draw the plots for a paper too: png, svg, pdf (extra: plot).", metavar="FORMAT,…", show_default=False
    ),
]
