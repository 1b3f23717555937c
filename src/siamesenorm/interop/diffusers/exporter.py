"""A run's model as a pipeline on disk."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from siamesenorm.errors import InteropError
from siamesenorm.interop.autoencoder import load_autoencoder
from siamesenorm.interop.diffusers.model import ResidualDiTModel
from siamesenorm.interop.diffusers.pipeline import ResidualDiTPipeline
from siamesenorm.interop.staging import staged
from siamesenorm.models.dit import DiT
from siamesenorm.tasks.diffusion.process import Process
from siamesenorm.tasks.diffusion.sampling import Sampler, default_sampler, make_scheduler


def pipeline_of(
    model: DiT,
    process: Process,
    *,
    class_names: Sequence[str] | None = None,
    vae: Path | None = None,
    clip: bool = False,
) -> ResidualDiTPipeline:
    """A pipeline with the model itself and the scheduler it was trained for; clip: hold images within ±1 on the way."""
    autoencoder = None if vae is None else load_autoencoder(vae)
    if autoencoder is not None and autoencoder.latent_channels != model.config.channels:
        raise InteropError(
            f"vae: {str(vae)!r} has latents of {autoencoder.latent_channels} channels; "
            f"this model takes {model.config.channels}"
        )
    scheduler = make_scheduler(process, Sampler(default_sampler(process), clip=clip))
    return ResidualDiTPipeline(
        ResidualDiTModel.of(model), scheduler, autoencoder and autoencoder.model, class_names=class_names
    )


def export(
    model: DiT,
    process: Process,
    folder: Path,
    *,
    class_names: Sequence[str] | None = None,
    vae: Path | None = None,
    clip: bool = False,
    overwrite: bool = False,
) -> None:
    """Write a folder that `ResidualDiTPipeline.from_pretrained` loads; it appears when it is complete.

    overwrite: replace an earlier export in its place; nothing else is replaced.
    """
    pipeline = pipeline_of(model, process, class_names=class_names, vae=vae, clip=clip)
    with staged(folder, overwrite) as place:
        pipeline.save_pretrained(place, safe_serialization=True)
