"""``--device`` and ``--precision``: where and in what numbers a command computes, under torchrun or alone."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from siamesenorm.train.inference import Inference

EXIT_FAILED = 1
Device = Annotated[str | None, typer.Option(help="Default: cuda where there is one, else cpu.", show_default=False)]
Precision = Annotated[
    str, typer.Option(help="Of matrix products, by autocast as in training: fp32, bf16 or fp16; the rest is fp32.")
]


@contextlib.contextmanager
def computing(device: str | None, precision: str, mode: Any = None) -> Iterator[Inference]:
    """The processes of a command; another one's death is one sentence. mode: fsdp or tp, to spread a model."""
    from siamesenorm.loading import loading

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
