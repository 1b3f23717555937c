"""The sections of a diffusion run: images or latents, the process, what is measured."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from siamesenorm.tasks.base import Section


class DiffusionDataConfig(Section):
    """The images, or latents, that a model learns to make."""

    train: str = Field(
        min_length=1,
        description="digits, fashion-mnist, hf:NAME, a .parquet file, a folder of images, or a folder of latents.",
    )
    test: str | None = Field(
        default=None, description="What the loss is measured on; null: the source's own test part."
    )
    held_out: float = Field(
        default=0.2, gt=0, lt=1, description="Share of each class to test on, where a source has no test images."
    )
    image_column: str | None = Field(default=None, description="Of tables; null: image, img or what is usual.")
    label_column: str | None = Field(default=None, description="Of tables; null: label or what is usual.")
    flip: float = Field(
        default=0.0, ge=0, le=1, description="Probability of a mirror image; latents: if encoded with --flip."
    )
    shuffle_seed: int | None = Field(default=None, ge=0, lt=2**63, description="Order and noise; null: train.seed.")
    workers: int = Field(default=0, ge=0, le=256, description="Processes that prepare images; 0: the training one.")
    prefetch: int = Field(default=2, ge=1, le=1024, description="Batches that each worker makes ahead.")


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
