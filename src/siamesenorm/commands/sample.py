"""``siamesenorm sample``: pictures from a trained diffusion model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from siamesenorm.commands.options import Device, Precision, computing


def sample(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a diffusion run.")],
    classes: Annotated[
        str | None, typer.Option(help="Classes: 0-9, 3,5, names, unconditional; all by default.")
    ] = None,
    out: Annotated[Path, typer.Option(help="The grid, a row for each class.")] = Path("samples.png"),
    per_class: Annotated[int, typer.Option(min=1, max=100_000, help="Samples of each class.")] = 8,
    sampler: Annotated[
        str | None, typer.Option(help="ddpm, ddim, dpm; euler for flows.", show_default="ddpm, or euler for flows")
    ] = None,
    steps: Annotated[
        int | None, typer.Option(min=1, help="Denoising steps.", show_default="ddpm 250, ddim 50, dpm 20, euler 50")
    ] = None,
    guidance: Annotated[float, typer.Option(help="Scale of classifier-free guidance; 1: none.")] = 2.0,
    guidance_channels: Annotated[
        int | None,
        typer.Option(min=1, help="Guide so many of the first channels; official: 3.", show_default="all"),
    ] = None,
    seed: Annotated[int, typer.Option(min=0, help="The same seed makes the same samples.")] = 0,
    filmstrip: Annotated[Path | None, typer.Option(help="Also draw how one sample of each class comes about.")] = None,
    individually: Annotated[
        Path | None,
        typer.Option(help="Also write every sample, as soon as it is made: into an .npz, or a folder of PNGs."),
    ] = None,
    vae: Annotated[Path | None, typer.Option(help="Folder of an AutoencoderKL, for models of latents.")] = None,
    at_once: Annotated[int, typer.Option(min=1, help="Samples computed at a time.")] = 100,
    device: Device = None,
    precision: Precision = "fp32",
) -> None:
    """Let a trained diffusion model make pictures of classes; the same command again goes on with --individually.

    Under torchrun processes share the samples.
    """
    from siamesenorm.interrupts import loading

    with loading():
        from siamesenorm.lab.sample_request import SampleRequest

    request = SampleRequest(
        run,
        out,
        classes=classes,
        per_class=per_class,
        sampler=sampler,
        steps=steps,
        guidance=guidance,
        guidance_channels=guidance_channels,
        seed=seed,
        filmstrip=filmstrip,
        individually=individually,
        vae=vae,
        at_once=at_once,
    )
    with computing(device, precision) as place:
        request.make(place, typer.echo)
