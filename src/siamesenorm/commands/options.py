"""Arguments and options that several commands have, each defined once, and where a command computes."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

from siamesenorm.commands.completion import complete_field, complete_recipe
from siamesenorm.refusal import EXIT_FAILED

if TYPE_CHECKING:
    from siamesenorm.train.inference import Inference

DTYPES = ("float32", "bfloat16", "float16")

Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Open = Annotated[bool, typer.Option("--open", help="Show the report in a browser.")]
Recipe = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE",
        help="A name that `siamesenorm recipes` lists, a YAML file, or the folder of a run.",
        autocompletion=complete_recipe,
    ),
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(
        metavar="[KEY=VALUE…]",
        help="Fields to change, such as topology=pre lr=3e-3 model.blocks=8.",
        autocompletion=complete_field,
    ),
]
RemoteCode = Annotated[bool, typer.Option(help="Put the code beside it that transformers loads without this package.")]
Jobs = Annotated[int | None, typer.Option(min=1, help="Cells at a time; by default one per GPU or core.")]
Engine = Annotated[
    str, typer.Option(help="Where cells run: local, or ray for a Ray cluster (extra: ray).", metavar="NAME")
]
Metric = Annotated[str | None, typer.Option(help="Held-out number to compare by.", metavar="NAME", show_default="loss")]
Baseline = Annotated[
    str | None,
    typer.Option(help="Topology to compare the others with.", metavar="NAME", show_default="the first one, or pre"),
]
Figures = Annotated[
    str | None, typer.Option(help="Draw the plots for a paper too: png, svg, pdf (extra: plot).", metavar="FORMAT,…")
]
Device = Annotated[str | None, typer.Option(help="Default: cuda where there is one, else cpu.")]
Precision = Annotated[
    str, typer.Option(help="Of matrix products, by autocast as in training: fp32, bf16 or fp16; the rest is fp32.")
]


@contextlib.contextmanager
def computing(device: str | None, precision: str, mode: Any = None) -> Iterator[Inference]:
    """The processes of a command; another one's death is one sentence. mode: fsdp or tp, to spread a model."""
    from siamesenorm.interrupts import loading

    with loading():
        from siamesenorm.train.distributed import lost_another
        from siamesenorm.train.inference import inference

    rank = size = 0
    try:
        with inference(device, precision, mode) as place:
            rank, size = place.world.rank, place.world.size
            yield place
    except Exception as error:
        if size < 2 or not lost_another(error):
            raise
        typer.echo(f"siamesenorm: process {rank}: another process has failed or was lost", err=True)
        raise typer.Exit(EXIT_FAILED) from None
