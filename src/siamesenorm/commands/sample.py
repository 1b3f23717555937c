"""``siamesenorm sample``: pictures from a trained diffusion model."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from siamesenorm.commands.device import Device, Precision, computing

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from torch import Tensor

    from siamesenorm.lab.sampling import Decode, Generator
    from siamesenorm.tasks.diffusion.pictures import Images
    from siamesenorm.tasks.diffusion.sampling import Sampler
    from siamesenorm.train.inference import Inference

FRAMES = 10
"""Pictures of a filmstrip, from noise to the sample."""
GRID_BYTES = 2**26
"""Of the images of a grid; of more samples the first ones of each class are shown."""


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

        from siamesenorm.lab.sampling import arranged, open_generator
        from siamesenorm.tasks.diffusion.pictures import grid, save_png
        from siamesenorm.tasks.diffusion.sampling import Sampler, usual_sampler
        from siamesenorm.train.errors import ConfigError

    _check_targets(out, filmstrip, individually)
    with computing(device, precision) as place:
        generator = open_generator(run)
        name: Any = sampler or usual_sampler(generator.process)
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
        sampling = _Sampling(generator, made, decode, labels, seed, at_once, place)
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


class _Sampling:
    """The samples of one call, batch by batch, by however many processes."""

    def __init__(
        self,
        generator: Generator,
        sampler: Sampler,
        decode: Decode,
        labels: NDArray[np.int64],
        seed: int,
        size: int,
        place: Inference,
    ) -> None:
        from siamesenorm.models.fingerprint import weights_hash

        self.generator, self.sampler, self.decode, self.place = generator, sampler, decode, place
        self.labels, self.seed, self.size = labels, seed, size
        self.weights = weights_hash(generator.model)  # before matrices are cast
        self.told: Callable[[float], None] = lambda images: None

    def batch(self, number: int) -> Images:
        """The images of a batch, which is computed in the same way whoever computes it."""
        first = number * self.size
        labels = self.labels[first : first + self.size].tolist()
        found = self.generator.make(
            labels,
            self.sampler,
            seed=self.seed,
            at_once=self.size,
            first=first,
            progress=lambda step, whole: self.told(len(labels) * step / whole),
        )
        return self.decode(found.images)

    def frames(self, count: int) -> list[Tensor]:
        """How the first samples come about."""
        labels = self.labels[:count].tolist()
        with self.place.autocast():
            return self.generator.make(labels, self.sampler, seed=self.seed, frames=FRAMES, at_once=count).frames

    def in_memory(self) -> Images:
        """All images."""
        import numpy as np

        batches = range(-(-len(self.labels) // self.size))
        return np.concatenate(list(self._done(batches, self.batch, len)))

    def to_disk(self, target: Path, classes: int, vae: Path | None) -> Images:
        """Write what is not there yet; the first images, as many as a grid shows."""
        import numpy as np

        from siamesenorm.lab.sample_files import open_samples

        names = [self.generator.name(number) for number in range(self.generator.model.config.classes + 1)]
        files, world = open_samples(target, self.labels, self.size, names), self.place.world
        with contextlib.ExitStack() as stack:
            world.agree_with_main(lambda: stack.enter_context(files.begin(self.settings(vae))))

            def write(number: int) -> int:
                files.write(number, self.batch(number))
                return len(files.numbers(number))

            for _ in self._done(world.from_main(files.missing() if world.is_main else []), write, int):
                pass
            if not world.is_main:
                return np.empty((0, 0, 0, 0), dtype=np.uint8)
            one = files.read(1)
            columns = max(1, GRID_BYTES // (one.nbytes * classes))
            shown = files.read(min(len(self.labels), columns * classes, max(1, GRID_BYTES // one.nbytes)))
            files.finish()
            return shown

    def settings(self, vae: Path | None) -> dict[str, Any]:
        """What decides every byte of the samples, as far as this program does."""
        return {
            "weights": self.weights,
            "step": self.generator.step,
            "samples": len(self.labels),
            "classes": list(dict.fromkeys(self.labels.tolist())),
            "sampler": self.sampler.name,
            "steps": self.sampler.steps_for(self.generator.process),
            "guidance": self.sampler.guidance,
            "guidance_channels": self.sampler.guidance_channels,
            "seed": self.seed,
            "at_once": self.size,
            "precision": self.place.precision,
            "vae": None if vae is None else str(vae.resolve()),
        }

    def _done(self, batches: Sequence[int], work: Callable[[int], Any], count: Callable[[Any], int]) -> Iterator[Any]:
        """Results of batches, with a bar meanwhile."""
        whole = sum(min(self.size, len(self.labels) - number * self.size) for number in batches)
        with _bar(self.place.is_main) as progress:
            task, done = progress.add_task("sampling", total=whole), 0
            self.told = lambda images: progress.update(task, completed=done + images)
            for found in self.place.each(batches, work):
                done += count(found)
                progress.update(task, completed=done)
                yield found


def _check_targets(out: Path, filmstrip: Path | None, individually: Path | None) -> None:
    """Say what cannot be written before anything is sampled."""
    from siamesenorm.train.errors import ConfigError

    for option, path in (("--out", out), ("--filmstrip", filmstrip)):
        if path is not None and (path.suffix.lower() != ".png" or path.is_dir()):
            raise ConfigError(f"{option}: {str(path)!r} is not allowed; it takes a file that ends with .png")
    if filmstrip is not None and filmstrip.absolute() == out.absolute():
        raise ConfigError(f"--filmstrip: {str(filmstrip)!r} is not allowed; it takes another file than --out")
    if individually is not None:
        from siamesenorm.lab.sample_files import check_place

        check_place(individually)


def _make_room(out: Path, filmstrip: Path | None, individually: Path | None) -> None:
    """Make the folders and try to write in them, so that no failure waits behind the sampling."""
    from siamesenorm.data.atomic import check_output
    from siamesenorm.train.errors import ConfigError

    for option, target in (("--out", out), ("--filmstrip", filmstrip), ("--individually", individually)):
        if target is None:
            continue
        try:
            target.parent.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise ConfigError(f"{option}: {str(target)!r} cannot be written: {error.strerror}") from None
        check_output(target / "0.png" if target.is_dir() else target, option)


def _bar(shown: bool) -> Any:
    from rich.console import Console
    from rich.progress import Progress

    console = Console(stderr=True)
    return Progress(console=console, transient=True, disable=not console.is_terminal or not shown)
