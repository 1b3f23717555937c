"""diffusers' ``AutoencoderKL`` from a local folder: images to latents and back (extra: diffusion).

autoencoder = load_autoencoder("sd-vae-ft-ema/")
images = autoencoder.decode(latents)           # uint8 (images, height, width, 3)
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from siamesenorm.errors import InteropError, check_torchvision
from siamesenorm.interop.foreign_folder import read_by_others, whole
from siamesenorm.models.fingerprint import weights_hash


class Autoencoder:
    """An ``AutoencoderKL`` with what surrounds it: bytes, scale and shift, batches."""

    def __init__(self, model: Any, device: str | torch.device = "cpu") -> None:
        config = model.config
        if getattr(config, "latents_mean", None) is not None or getattr(config, "latents_std", None) is not None:
            raise InteropError("vae: an autoencoder with latents_mean or latents_std is not supported")
        self.model, self.device = model.to(device).eval().requires_grad_(False), device
        self.fingerprint = weights_hash(model)
        self.channels, self.latent_channels = int(config.in_channels), int(config.latent_channels)
        self.downscale = 2 ** (len(config.block_out_channels) - 1)
        self.scale, self.shift = float(config.scaling_factor), float(config.shift_factor or 0.0)

    def try_out(self) -> None:
        """Raise where it does not do on a tiny image what its configuration says."""
        side = 2 * self.downscale
        moments = self.encode(np.zeros((1, side, side, self.channels), dtype=np.uint8))
        if moments.shape != (1, 2 * self.latent_channels, 2, 2) or not 0 < abs(self.scale) < float("inf"):
            raise ValueError(f"latents of {side} × {side} pixels have the shape {moments.shape[1:]}")
        back = self.decode(torch.from_numpy(moments[:, : self.latent_channels]))
        if back.shape[:3] != (1, side, side):
            raise ValueError(f"images of 2 × 2 latents have the shape {back.shape[1:]}")

    @torch.inference_mode()
    def encode(self, images: NDArray[np.uint8]) -> NDArray[np.float32]:
        """Means and deviations (images, 2 · latent channels, height, width) of uint8 (images, H, W, channels)."""
        pixels = torch.from_numpy(np.ascontiguousarray(images)).permute(0, 3, 1, 2).to(self.device)
        posterior = self.model.encode(pixels.to(self.model.dtype) / 127.5 - 1).latent_dist
        return torch.cat([posterior.mean, posterior.std], 1).float().cpu().numpy()

    @torch.inference_mode()
    def decode(self, latents: Tensor, batch: int = 16) -> NDArray[np.uint8]:
        """Images as bytes (images, height, width, channels) of latents as a model makes them."""
        if latents.dim() != 4 or latents.shape[1] != self.latent_channels:
            raise InteropError(
                f"vae: latents of shape {tuple(latents.shape)} are not allowed; this autoencoder takes "
                f"(images, {self.latent_channels}, height, width)"
            )
        parts = [
            self.model.decode((part / self.scale + self.shift).to(self.device, self.model.dtype)).sample
            for part in latents.split(batch)
        ]
        images = (torch.cat(parts).float() * 127.5 + 127.5).round().clamp(0, 255).to(torch.uint8)
        return images.permute(0, 2, 3, 1).cpu().numpy()


def load_autoencoder(folder: str | Path, device: str | torch.device = "cpu") -> Autoencoder:
    """The autoencoder in a folder, or in the folder ``vae`` of a pipeline; nothing is downloaded."""
    check_torchvision()
    with InteropError.importing("AutoencoderKL", "diffusers", "diffusion"):
        from diffusers import AutoencoderKL
    path = Path(folder)
    found = next((place for place in (path, path / "vae") if (place / "config.json").is_file()), None)
    if found is None:
        raise InteropError.not_allowed("vae", str(folder), "a folder with config.json and weights of an AutoencoderKL")
    options = {"local_files_only": True, "use_safetensors": True, "low_cpu_mem_usage": False}
    with read_by_others("vae", found):
        loaded = Autoencoder(whole(AutoencoderKL.from_pretrained(found, output_loading_info=True, **options)), device)
        loaded.try_out()
        return loaded
