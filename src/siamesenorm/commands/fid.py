"""``siamesenorm fid``: how close generated images are to real ones."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from siamesenorm.commands.options import Device, Json, Precision, computing

if TYPE_CHECKING:
    from rich.console import Console

    from siamesenorm.lab.fidelity import FidelityReport

LABELS = {
    "fid": "FID",
    "sfid": "sFID",
    "frechet": "Fréchet distance (not FID)",
    "inception_score": "Inception score",
    "classifier_score": "classifier score",
}


def fid(
    generated: Annotated[str, typer.Argument(metavar="GENERATED", help="Folder of images, or .npz as ADM writes it.")],
    reference: Annotated[
        str,
        typer.Argument(
            metavar="REFERENCE",
            help="Folder or .npz of images, a file of statistics (.safetensors of --save-stats, .npz with mu and "
            "sigma), or labelled images by name, such as digits.",
        ),
    ],
    weights: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Weights of FID's Inception: pt_inception-2015-12-05-6726825d.pth, or the same as safetensors.",
        ),
    ] = None,
    classifier: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="Without --weights: labelled images that the small classifier learns from; default: REFERENCE.",
        ),
    ] = None,
    split: Annotated[str, typer.Option(help="Split of a REFERENCE of labelled images: train or test.")] = "train",
    save_stats: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Keep the reference's statistics: .safetensors or .npz.")
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, max=4096, help="Images looked at together.")] = 64,
    device: Device = None,
    precision: Precision = "fp32",
    cache: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Where classifiers and statistics are kept.")
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare generated images with real ones: FID, sFID, Inception score, precision and recall.

    Without Inception's weights the same is measured in the features of a small classifier, which is not FID.
    Under torchrun processes share the images.
    """
    from siamesenorm.interrupts import loading

    with loading():
        from rich.console import Console

        from siamesenorm.lab.fidelity import FidelityRequest
        from siamesenorm.terminal import counting_bar

    request = FidelityRequest(
        generated,
        reference,
        weights=weights,
        classifier=classifier,
        split=split,
        save_stats=save_stats,
        cache=cache,
    )
    with computing(device, precision) as place:
        stage = partial(counting_bar, Console(stderr=True, quiet=not place.is_main))
        found = request.measure(place, stage, batch_size=batch_size)
    if found is None:
        return
    if as_json:
        typer.echo(json.dumps(found.as_json(), indent=1, ensure_ascii=False))
    else:
        _show(Console(), found)


def _show(console: Console, found: FidelityReport) -> None:
    from rich.text import Text

    from siamesenorm.terminal import rows_table

    figures = {LABELS.get(key, key): value for key, value in found.figures.items()}
    figures["recognised as their class"] = found.accuracy
    known = ((name, value) for name, value in figures.items() if value is not None)
    console.print(rows_table((name, Text(f"{value:.4f}", justify="right")) for name, value in known))
    reference = f"{found.reference_images:,}" if found.reference_images else "an unknown number"
    console.print(f"{found.images:,} images beside {reference} of the reference", highlight=False)
    for note in found.notes:
        console.print(f"note: {note}", highlight=False, style="dim")
