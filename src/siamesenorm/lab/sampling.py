"""Images of a trained diffusion run: which classes, how many of each, decoded where the model makes latents."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from siamesenorm.data.latents import is_latents
from siamesenorm.errors import ConfigError
from siamesenorm.models.dit import DiT
from siamesenorm.tasks.diffusion.data import to_bytes
from siamesenorm.tasks.diffusion.process import Process
from siamesenorm.tasks.diffusion.sample_grid import Images
from siamesenorm.tasks.diffusion.sampling import Sampler, Samples, sample
from siamesenorm.tasks.diffusion.task import DiffusionTask, process_of
from siamesenorm.train.trained import open_trained

Decode = Callable[[Tensor], Images]
UNCONDITIONAL = "unconditional"
"""What a class list calls the label of no class."""


@dataclass(frozen=True)
class Generator:
    """A trained model that makes images of classes: ``open_generator(run).make([3, 3, 7], Sampler("ddim"))``."""

    model: DiT
    process: Process
    class_names: list[str]
    latent: bool
    step: int

    def make(
        self,
        labels: list[int],
        sampler: Sampler,
        *,
        seed: int = 0,
        frames: int = 0,
        at_once: int = 100,
        first: int = 0,
        progress: Callable[[int, int], None] | None = None,
    ) -> Samples:
        """One image for each label, as the model makes them; frames are those of the first part of `at_once`.

        first: the number of the first sample, on which and on the seed alone all that is random about one depends.
        """
        c, made, steps = self.model.config, [], sampler.steps_for(self.process)
        kept: list[Tensor] = []
        numbers = torch.tensor(labels, device=self.model.head.weight.device)
        parts = range(0, len(labels), at_once)
        for part, start in enumerate(parts):

            def report(step: int, part: int = part) -> None:
                if progress is not None:
                    progress(part * steps + step, len(parts) * steps)

            found = sample(
                self.model,
                numbers[start : start + at_once],
                (c.channels, c.input_size, c.input_size),
                self.process,
                sampler,
                unconditional=c.classes if c.class_dropout else None,
                seed=seed,
                first=first + start,
                frames=frames if start == 0 else 0,
                progress=report,
            )
            made.append(found.images)
            kept = kept or found.frames
        return Samples(torch.cat(made), kept)

    def decoder(self, autoencoder: Path | None, device: torch.device | str = "cpu") -> Decode:
        """From what the model makes to bytes; an autoencoder computes on the device, in its own precision."""
        if not self.latent:
            if autoencoder is not None:
                raise ConfigError.refused("vae", autoencoder, "this model makes pixels")
            return to_bytes
        if autoencoder is None:
            raise ConfigError("vae: is missing; a model of latents takes the folder of their AutoencoderKL")
        from siamesenorm.interop.autoencoder import load_autoencoder

        loaded, channels = load_autoencoder(autoencoder, device), self.model.config.channels
        if loaded.latent_channels != channels:
            raise ConfigError.refused(
                "vae",
                autoencoder,
                f"its latents have {loaded.latent_channels} channels and this model makes {channels}",
            )

        def decode(latents: Tensor) -> Images:
            with torch.autocast(torch.device(device).type, enabled=False):
                return loaded.decode(latents.float())

        return decode

    def classes(self, text: str) -> list[int]:
        """Classes of a text such as ``0-9``, ``3,5``, ``Sandal,Bag`` or ``unconditional``."""
        c = self.model.config
        found: list[int] = []
        names = [name.casefold() for name in self.class_names]
        for part in (part.strip() for part in text.split(",")):
            low, dash, high = part.partition("-")
            if part.casefold() in names:
                found.append(names.index(part.casefold()))
                continue
            if part.casefold() == UNCONDITIONAL:
                if not c.class_dropout:
                    raise ConfigError.refused("classes", part, "this model saw every label")
                found.append(c.classes)
                continue
            if part.isdecimal():
                low = high = part
            elif not (dash and low.strip().isdecimal() and high.strip().isdecimal() and int(low) <= int(high)):
                raise ConfigError.not_allowed(
                    "classes", part, f"numbers, ranges such as 0-9, names, or {UNCONDITIONAL}"
                )
            if int(high) >= c.classes:
                raise ConfigError.not_allowed("classes", high.strip(), f"0 to {c.classes - 1}")
            found.extend(range(int(low), int(high) + 1))
        return found

    def name(self, number: int) -> str:
        """What a class is called; its number where it has no name."""
        if number == self.model.config.classes:
            return UNCONDITIONAL
        return self.class_names[number] if number < len(self.class_names) else str(number)


def open_generator(folder: Path | str) -> Generator:
    """The generator of a run folder, finished or not."""
    trained = open_trained(folder, "diffusion")
    config: Any = trained.config
    assert isinstance(trained.model, DiT)
    names = DiffusionTask.class_names(config, trained.folder)
    latent = is_latents(config.data.train) or config.model.channels not in (1, 3)
    return Generator(trained.model, process_of(config), names, latent, trained.step)
