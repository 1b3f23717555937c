"""Pictures of a trained diffusion run as files: a grid of all classes, how samples come about, and every sample."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from rich.console import Console
from torch import Tensor

from siamesenorm.data.atomic import check_output
from siamesenorm.errors import ConfigError
from siamesenorm.lab.sample_files import check_place, open_samples
from siamesenorm.lab.sampling import Decode, Generator, open_generator
from siamesenorm.models.fingerprint import weights_hash
from siamesenorm.tasks.diffusion.sample_grid import Images, grid, save_png
from siamesenorm.tasks.diffusion.sampling import Sampler, default_sampler
from siamesenorm.terminal import progress_bar
from siamesenorm.train.inference import Inference

FRAMES = 10
"""Pictures of a filmstrip, from noise to the sample."""
GRID_BYTES = 2**26
"""Of the images of a grid; of more samples the first ones of each class are shown."""


@dataclass(frozen=True)
class SampleRequest:
    """Samples to be made: ``SampleRequest("runs/dit", out=Path("samples.png"), classes="0-9").make(place, print)``.

    Targets are checked when it is made: what cannot be written is said before anything is sampled.
    """

    run: Path | str
    out: Path
    """The grid, a row for each class."""
    classes: str | None = None
    per_class: int = 8
    sampler: str | None = None
    steps: int | None = None
    guidance: float = 2.0
    guidance_channels: int | None = None
    seed: int = 0
    filmstrip: Path | None = None
    """How one sample of each class comes about."""
    individually: Path | None = None
    """Every sample as soon as it is made: an ``.npz``, or a folder of PNGs."""
    vae: Path | None = None
    at_once: int = 100

    def __post_init__(self) -> None:
        for option, path in (("--out", self.out), ("--filmstrip", self.filmstrip)):
            if path is not None and (path.suffix.lower() != ".png" or path.is_dir()):
                raise ConfigError.not_allowed(option, str(path), "a file that ends with .png")
        if self.filmstrip is not None and self.filmstrip.absolute() == self.out.absolute():
            raise ConfigError.not_allowed("--filmstrip", str(self.filmstrip), "another file than --out")
        if self.individually is not None:
            check_place(self.individually)

    def make(self, place: Inference, report: Callable[[str], object]) -> None:
        """Make and write the samples; ``report`` gets a line for every file, in the first process."""
        generator = open_generator(self.run)
        name: Any = self.sampler or default_sampler(generator.process)
        sampler = Sampler(name, self.steps, self.guidance, self.guidance_channels, clip=not generator.latent)
        sampler.check(generator.process)
        if self.guidance != 1 and not generator.model.config.class_dropout:
            raise ConfigError.refused("guidance", self.guidance, "a model that saw every label takes 1")
        decode = generator.decoder(self.vae, place.device)
        wanted = f"0-{generator.model.config.classes - 1}" if self.classes is None else self.classes
        chosen = list(dict.fromkeys(generator.classes(wanted)))
        # Samples of one class stand apart, so that the first ones of all classes are in the first part.
        labels = np.array(chosen * self.per_class, dtype=np.int64)
        if place.is_main:
            self._make_room()
        sampling = SampleBatches(generator, sampler, decode, labels, self.seed, self.at_once, place)
        place.ready(generator.model)
        if self.individually is None:
            shown = sampling.in_memory()
        else:
            shown = sampling.to_disk(self.individually, len(chosen), self.vae)
        if not place.is_main:
            return
        names = [generator.name(number) for number in chosen]
        rows = [shown[labels[: len(shown)] == number] for number in chosen]
        save_png(grid([row for row in rows if len(row)], names[: len(shown)]), self.out)
        report(f"{len(labels)} samples of {len(chosen)} classes at step {generator.step}: {self.out}")
        if len(shown) < len(labels):
            report(f"of these, the grid shows the first {len(shown)}")
        if self.filmstrip is not None:
            frames = [decode(frame) for frame in sampling.frames(len(chosen))]
            strips = [np.stack([frame[k] for frame in frames]) for k in range(len(chosen))]
            save_png(grid(strips, names), self.filmstrip)
            report(f"{len(frames)} states of each: {self.filmstrip}")
        if self.individually is not None:
            report(f"every sample: {self.individually}")

    def _make_room(self) -> None:
        """Make the folders and try to write in them, so that no failure waits behind the sampling."""
        targets = {"--out": self.out, "--filmstrip": self.filmstrip, "--individually": self.individually}
        for option, target in targets.items():
            if target is None:
                continue
            try:
                target.parent.mkdir(parents=True, exist_ok=True)
            except OSError as error:
                raise ConfigError.failed(option, target, "written", error) from None
            check_output(target / "0.png" if target.is_dir() else target, option)


class SampleBatches:
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
        self.generator, self.sampler, self.decode, self.place = generator, sampler, decode, place
        self.labels, self.seed, self.size = labels, seed, size
        self.weights = weights_hash(generator.model)  # before matrices are cast
        self.report: Callable[[float], None] = lambda images: None

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
            progress=lambda step, whole: self.report(len(labels) * step / whole),
        )
        return self.decode(found.images)

    def frames(self, count: int) -> list[Tensor]:
        """How the first samples come about."""
        labels = self.labels[:count].tolist()
        with self.place.autocast():
            return self.generator.make(labels, self.sampler, seed=self.seed, frames=FRAMES, at_once=count).frames

    def in_memory(self) -> Images:
        """All images."""
        batches = range(-(-len(self.labels) // self.size))
        return np.concatenate(list(self._done(batches, self.batch, len)))

    def to_disk(self, target: Path, classes: int, vae: Path | None) -> Images:
        """Write what is not there yet; the first images, as many as a grid shows."""
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
        done = 0
        with progress_bar(Console(stderr=True), "sampling", self.place.is_main) as progress:
            self.report = lambda images: progress(done + images, whole)
            for found in self.place.each(batches, work):
                done += count(found)
                progress(done, whole)
                yield found
