"""Latents of images, encoded once and read in training as images are.

from siamesenorm.data.latents import open_latents
latents = open_latents("latents/", "train")
latents.transform(flip=0.5)(latents[0], generator)       # (channels, height, width): drawn and scaled
"""

from siamesenorm.data.latents.index import is_latents
from siamesenorm.data.latents.latent_set import LatentImages, PosteriorSample, open_latents

__all__ = ["LatentImages", "PosteriorSample", "is_latents", "open_latents"]
