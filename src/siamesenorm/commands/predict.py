"""``siamesenorm predict``: classes of images by a trained classifier."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer

from siamesenorm.commands.options import Device, Json, Precision, computing


def predict(
    run: Annotated[
        Path, typer.Argument(metavar="RUN", help="Folder of a run, or a file of `siamesenorm export --to safetensors`.")
    ],
    images: Annotated[
        list[Path], typer.Argument(metavar="IMAGE…", help="Image files (png, jpg, …) or .npy arrays of bytes.")
    ],
    top: Annotated[int, typer.Option(min=1, max=1000, help="How many of the likeliest classes are shown.")] = 3,
    as_json: Json = False,
    batch_size: Annotated[int, typer.Option(min=1, max=4096, help="Images looked at together.")] = 64,
    device: Device = None,
    precision: Precision = "fp32",
) -> None:
    """Tell what images show, with the likeliest classes and their probabilities; torchrun's processes share them."""
    from rich.console import Console
    from rich.text import Text

    from siamesenorm.interrupts import loading
    from siamesenorm.terminal import rows_table

    with loading():
        from siamesenorm.lab.prediction import open_classifier, read_image

    with computing(device, precision) as place:
        read = [(path, read_image(path)) for path in images]
        classifier = open_classifier(run)
        place.ready(classifier.model)
        names = [str(path) if len(found) == 1 else f"{path}[{n}]" for path, found in read for n in range(len(found))]
        answers = classifier([image for _, found in read for image in found], top, batch_size, place)
    if not place.is_main:
        return
    if as_json:
        found = [
            {"image": name, "classes": [{"class": label, "probability": share} for label, share in answer]}
            for name, answer in zip(names, answers, strict=True)
        ]
        typer.echo(json.dumps(found, indent=1, ensure_ascii=False))
        return
    table = rows_table()
    table.add_column(overflow="fold", style="bold cyan")
    for name, answer in zip(names, answers, strict=True):
        best, *others = [f"{label} {share:.1%}" for label, share in answer]
        table.add_row(Text(name), Text(best, style="bold"), *(Text(other, style="dim") for other in others))
    Console().print(table)
