"""The sections of a diffusion run: images or latents, the process, what is measured."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from siamesenorm.tasks.base import Section
from siamesenorm.tasks.images import ImageSourceConfig


class DiffusionDataConfig(ImageSourceConfig):
    """The images that a model learns to make; a folder of latents is named as one of images."""

    flip: float = Field(
        default=0.0, ge=0, le=1, description="Probability of a mirror image; latents: if encoded with --flip."
    )


class ProcessConfig(Section):
    """What the model predicts, and how noise is added."""

    prediction: Literal["epsilon", "velocity", "flow"] = Field(
        default="epsilon",
        description="The noise; the velocity of arXiv 2202.00512; or the straight line's of flow matching.",
    )
    schedule: Literal["linear", "cosine"] = Field(default="linear", description="Noise by timestep; flows have none.")
    timesteps: int = Field(default=1000, ge=2, le=100_000, description="Timesteps of the schedule.")


class DiffusionEvaluationConfig(Section):
    """What is measured on held-out images, and on samples."""

    every: int | None = Field(default=1000, ge=1, description="Steps between evaluations, also at the end; null: none.")
    images: int | None = Field(default=None, ge=1, description="Held-out images, evenly spread; null: all.")
    at_once: int = Field(default=256, ge=1, le=2**20, description="Images that are computed at a time.")
    samples: int = Field(
        default=0,
        ge=0,
        le=10**6,
        description="Samples for the Fréchet distance in the features of a small classifier (not FID); 0: none.",
    )
    sampler: Literal["ddpm", "ddim", "dpm", "euler"] | None = Field(
        default=None, description="How they are sampled; null: dpm, or euler for flows."
    )
    sampling_steps: int | None = Field(default=None, ge=1, description="Steps of the sampler; null: its usual number.")
    guidance: float = Field(default=1.0, ge=0, le=100, description="Scale of classifier-free guidance; 1: none.")
