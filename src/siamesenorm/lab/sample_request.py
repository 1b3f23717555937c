"""Pictures of a trained diffusion run as files: a grid of all classes, how samples come about, and every sample."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from siamesenorm.data.atomic import check_output
from siamesenorm.errors import ConfigError
from siamesenorm.lab.sample_batches import SampleBatches
from siamesenorm.lab.sample_files import check_place
from siamesenorm.lab.sampling import arranged, open_generator
from siamesenorm.tasks.diffusion.sample_grid import grid, save_png
from siamesenorm.tasks.diffusion.sampling import Sampler, default_sampler
from siamesenorm.train.inference import Inference


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
            raise ConfigError(f"guidance: {self.guidance} is not allowed; a model that saw every label takes 1")
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
        rows = arranged(shown, labels[: len(shown)], chosen)
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
