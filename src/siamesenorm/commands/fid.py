"""``siamesenorm fid``: how close generated images are to real ones."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from siamesenorm.commands.device import Device, Precision, computing
from siamesenorm.commands.options import Json

if TYPE_CHECKING:
    from rich.console import Console

    from siamesenorm.tasks.fidelity.measure import Fidelity

NAMES = {
    "inception": ("FID", "sFID", "Inception score", "precision", "recall"),
    "classifier": ("Fréchet distance (not FID)", "", "classifier score", "precision", "recall"),
}
KEYS = {
    "inception": ("fid", "sfid", "inception_score", "precision", "recall"),
    "classifier": ("frechet", "", "classifier_score", "precision", "recall"),
}


def fid(
    generated: Annotated[
        str, typer.Argument(metavar="GENERATED", help="Folder of images, or .npz as ADM writes it.", show_default=False)
    ],
    reference: Annotated[
        str,
        typer.Argument(
            metavar="REFERENCE",
            help="Folder or .npz of images, a file of statistics (.safetensors of --save-stats, .npz with mu and "
            "sigma), or labelled images by name, such as digits.",
            show_default=False,
        ),
    ],
    weights: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Weights of FID's Inception: pt_inception-2015-12-05-6726825d.pth, or the same as safetensors.",
            show_default=False,
        ),
    ] = None,
    classifier: Annotated[
        str | None,
        typer.Option(
            metavar="SOURCE",
            help="Without --weights: labelled images that the small classifier learns from; default: REFERENCE.",
            show_default=False,
        ),
    ] = None,
    split: Annotated[str, typer.Option(help="Split of a REFERENCE of labelled images: train or test.")] = "train",
    save_stats: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Keep the reference's statistics: .safetensors or .npz.", show_default=False),
    ] = None,
    batch_size: Annotated[int, typer.Option(min=1, max=4096, help="Images looked at together.")] = 64,
    device: Device = None,
    precision: Precision = "fp32",
    cache: Annotated[
        Path | None,
        typer.Option(metavar="DIR", help="Where classifiers and statistics are kept.", show_default=False),
    ] = None,
    as_json: Json = False,
) -> None:
    """Compare generated images with real ones: FID, sFID, Inception score, precision and recall.

    Without Inception's weights the same is measured in the features of a small classifier, which is not FID.
    Under torchrun processes share the images.
    """
    from siamesenorm.loading import loading

    with loading():
        from rich.console import Console

        from siamesenorm.errors import DataError
        from siamesenorm.tasks.fidelity.classifier import default_cache
        from siamesenorm.tasks.fidelity.image_batches import open_pictures
        from siamesenorm.tasks.fidelity.measure import compare, describe, recognised
        from siamesenorm.tasks.fidelity.references import check_target, write_reference
        from siamesenorm.tasks.fidelity.sources import check_split, open_network, open_reference

    side = check_split(split)
    if save_stats is not None:
        check_target(save_stats)
    pictures = open_pictures(generated)
    folder = cache or default_cache()
    if folder.exists() and not folder.is_dir():
        raise DataError(f"--cache: {str(folder)!r} is a file; it takes a folder")
    with computing(device, precision) as place:
        console = Console(stderr=True, quiet=not place.is_main)
        with _progress(console, "classifier" if weights is None else "weights"):
            network = open_network(weights, classifier, reference, folder, place.device, place.dtype)
        with _progress(console, "reference") as done:
            real = open_reference(reference, side, network, folder, batch_size, done, place.sharing)
        with _progress(console, "generated", pictures.count) as done:
            made = describe(pictures, network, batch=batch_size, progress=done, sharing=place.sharing)
    if not place.is_main:
        return
    found = compare(made, real)
    if save_stats is not None:
        write_reference(save_stats, real)
    facts: dict[str, Any] = {
        "features": network.name,
        "network": network.fingerprint,
        "images": pictures.count,
        "reference_images": real.count,
    }
    accuracy = recognised(made, pictures, network)
    if accuracy is not None:
        facts["accuracy"] = accuracy
    notes = remarks(network.name, pictures.count, found)
    if as_json:
        figures = {key: value for key, value in zip(KEYS[network.name], found, strict=True) if key}
        typer.echo(json.dumps({**facts, **figures, "notes": notes}, indent=1, ensure_ascii=False))
    else:
        _show(Console(), facts, found, notes)


def remarks(features: str, images: int, found: Fidelity) -> list[str]:
    """What a reader of the figures must know."""
    from siamesenorm.tasks.fidelity.measure import FEW

    notes = []
    if images < FEW:
        notes.append(
            f"{images:,} images: with fewer than {FEW:,} the Fréchet distance comes out too high; "
            "compare it only at the same number"
        )
    if features == "classifier":
        notes.append("measured in the features of a small classifier: compares models on these images, and is not FID")
    if found.precision is None:
        notes.append("the reference holds no images or features, so precision and recall are left out")
    return notes


def _show(console: Console, facts: dict[str, Any], found: Fidelity, notes: list[str]) -> None:
    from rich.table import Table

    table = Table(box=None, pad_edge=False, show_header=False)
    table.add_column(justify="left")
    table.add_column(justify="right")
    for name, value in zip(NAMES[facts["features"]], found, strict=True):
        if name and value is not None:
            table.add_row(name, f"{value:.4f}")
    if "accuracy" in facts:
        table.add_row("recognised as their class", f"{facts['accuracy']:.4f}")
    console.print(table)
    reference = f"{facts['reference_images']:,}" if facts["reference_images"] else "an unknown number"
    console.print(f"{facts['images']:,} images beside {reference} of the reference", highlight=False)
    for note in notes:
        console.print(f"note: {note}", highlight=False, style="dim")


@contextlib.contextmanager
def _progress(console: Console, stage: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """A bar on a terminal; the function given is told how many images each step did."""
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal or console.quiet) as bar:
        task = bar.add_task(stage, total=total)
        yield lambda images: bar.advance(task, images)
