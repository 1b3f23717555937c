"""``siamesenorm sample``: pictures from a trained diffusion model."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from siamesenorm.commands.device import Device, Precision, computing


def sample(
    run: Annotated[Path, typer.Argument(metavar="RUN", help="Folder of a diffusion run.", show_default=False)],
    classes: Annotated[
        str | None, typer.Option(help="Classes: 0-9, 3,5, names, unconditional; all by default.", show_default=False)
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
    filmstrip: Annotated[
        Path | None, typer.Option(help="Also draw how one sample of each class comes about.", show_default=False)
    ] = None,
    individually: Annotated[
        Path | None,
        typer.Option(
            help="Also write every sample, as soon as it is made: into an .npz, or a folder of PNGs.",
            show_default=False,
        ),
    ] = None,
    vae: Annotated[
        Path | None, typer.Option(help="Folder of an AutoencoderKL, for models of latents.", show_default=False)
    ] = None,
    at_once: Annotated[int, typer.Option(min=1, help="Samples computed at a time.")] = 100,
    device: Device = None,
    precision: Precision = "fp32",
) -> None:
    """Let a trained diffusion model make pictures of classes; the same command again goes on with --individually.

    Under torchrun processes share the samples.
    """
    from siamesenorm.loading import loading

    with loading():
        import numpy as np

        from siamesenorm.errors import ConfigError
        from siamesenorm.lab.sample_batches import SampleBatches
        from siamesenorm.lab.sampling import arranged, open_generator
        from siamesenorm.tasks.diffusion.sample_grid import grid, save_png
        from siamesenorm.tasks.diffusion.sampling import Sampler, default_sampler

    _check_targets(out, filmstrip, individually)
    with computing(device, precision) as place:
        generator = open_generator(run)
        name: Any = sampler or default_sampler(generator.process)
        made = Sampler(name, steps, guidance, guidance_channels, clip=not generator.latent)
        made.check(generator.process)
        if guidance != 1 and not generator.model.config.class_dropout:
            raise ConfigError(f"guidance: {guidance} is not allowed; a model that saw every label takes 1")
        decode = generator.decoder(vae, place.device)
        wanted = f"0-{generator.model.config.classes - 1}" if classes is None else classes
        chosen = list(dict.fromkeys(generator.classes(wanted)))
        # Samples of one class stand apart, so that the first ones of all classes are in the first part.
        labels = np.array(chosen * per_class, dtype=np.int64)
        if place.is_main:
            _make_room(out, filmstrip, individually)
        sampling = SampleBatches(generator, made, decode, labels, seed, at_once, place)
        place.ready(generator.model)
        shown = sampling.in_memory() if individually is None else sampling.to_disk(individually, len(chosen), vae)
        if not place.is_main:
            return
        names = [generator.name(number) for number in chosen]
        rows = arranged(shown, labels[: len(shown)], chosen)
        save_png(grid([row for row in rows if len(row)], names[: len(shown)]), out)
        typer.echo(f"{len(labels)} samples of {len(chosen)} classes at step {generator.step}: {out}")
        if len(shown) < len(labels):
            typer.echo(f"of these, the grid shows the first {len(shown)}")
        if filmstrip is not None:
            frames = [decode(frame) for frame in sampling.frames(len(chosen))]
            save_png(grid([np.stack([frame[k] for frame in frames]) for k in range(len(chosen))], names), filmstrip)
            typer.echo(f"{len(frames)} states of each: {filmstrip}")
        if individually is not None:
            typer.echo(f"every sample: {individually}")


def _check_targets(out: Path, filmstrip: Path | None, individually: Path | None) -> None:
    """Say what cannot be written before anything is sampled."""
    from siamesenorm.errors import ConfigError

    for option, path in (("--out", out), ("--filmstrip", filmstrip)):
        if path is not None and (path.suffix.lower() != ".png" or path.is_dir()):
            raise ConfigError.not_allowed(option, str(path), "a file that ends with .png")
    if filmstrip is not None and filmstrip.absolute() == out.absolute():
        raise ConfigError.not_allowed("--filmstrip", str(filmstrip), "another file than --out")
    if individually is not None:
        from siamesenorm.lab.sample_files import check_place

        check_place(individually)


def _make_room(out: Path, filmstrip: Path | None, individually: Path | None) -> None:
    """Make the folders and try to write in them, so that no failure waits behind the sampling."""
    from siamesenorm.data.atomic import check_output
    from siamesenorm.errors import ConfigError

    for option, target in (("--out", out), ("--filmstrip", filmstrip), ("--individually", individually)):
        if target is None:
            continue
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError.failed(option, target, "written", error) from None
        check_output(target / "0.png" if target.is_dir() else target, option)
