"""From class labels to pictures, as a pipeline of diffusers: any of its schedulers, its devices, its files."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from typing import Any

import torch
from diffusers import (
    AutoencoderKL,
    DDPMScheduler,
    DiffusionPipeline,
    FlowMatchEulerDiscreteScheduler,
    ImagePipelineOutput,
)
from diffusers.utils.torch_utils import randn_tensor
from torch import Tensor

from siamesenorm.errors import InteropError
from siamesenorm.interop.diffusers.model import ResidualDiTModel
from siamesenorm.tasks.diffusion.sampling import Sampler, guided

OUTPUTS = ("pil", "np", "pt", "latent")
LEARNT = ("learned", "learned_range")
"""Kinds of variance for which a scheduler reads the second half of a prediction."""


class ResidualDiTPipeline(DiffusionPipeline):
    """Class-conditional images by a diffusion Transformer.

    transformer: the model. scheduler: any of diffusers' that fits its prediction. vae: turns latents into images,
    None for models of pixels. class_names: allow labels to be given as names.
    """

    model_cpu_offload_seq = "transformer->vae"
    _optional_components = ["vae"]  # noqa: RUF012

    def __init__(
        self,
        transformer: ResidualDiTModel,
        scheduler: Any,
        vae: AutoencoderKL | None = None,
        class_names: Sequence[str] | None = None,
    ) -> None:
        super().__init__()
        model = getattr(transformer, "_orig_mod", transformer)  # what torch.compile wraps
        if model is not None and not isinstance(model, ResidualDiTModel):
            raise InteropError.not_allowed("transformer", type(model).__name__, "a ResidualDiTModel")
        self.register_modules(transformer=transformer, scheduler=scheduler, vae=vae)
        self.register_to_config(class_names=None if class_names is None else list(class_names))

    @torch.no_grad()
    def __call__(
        self,
        class_labels: int | str | Sequence[int | str],
        guidance_scale: float = 1.0,
        num_inference_steps: int = 50,
        generator: torch.Generator | list[torch.Generator] | None = None,
        guidance_channels: int | None = None,
        latents: Tensor | None = None,
        output_type: str = "pil",
        return_dict: bool = True,
    ) -> ImagePipelineOutput | tuple[Any]:
        """One image for each label.

        class_labels: numbers or names. guidance_scale: 1 is none. guidance_channels: how many of the first channels
        are guided, None all; the official code takes 3. latents: noise to begin with, (images, channels, size,
        size). output_type: pil, np or pt (0 to 1), or latent, what the model makes.
        """
        config = self.transformer.config
        if output_type not in OUTPUTS:
            raise InteropError.not_allowed("output_type", output_type, OUTPUTS)
        if guidance_scale != 1 and not config.class_dropout:
            raise ValueError(f"guidance_scale: {guidance_scale} is not allowed; a model that saw every label takes 1")
        labels = torch.tensor(self.label_numbers(class_labels), device=self._execution_device)
        shape = (len(labels), config.channels, config.input_size, config.input_size)
        if latents is None:
            latents = randn_tensor(shape, generator=generator, device=labels.device, dtype=self.transformer.dtype)
        elif tuple(latents.shape) != shape:
            raise ValueError(f"latents: shape {tuple(latents.shape)} is not allowed; it takes {shape}")
        x = latents.to(labels.device)
        scheduler, learnt = self._ready_scheduler(num_inference_steps)
        x = x * getattr(scheduler, "init_noise_sigma", 1.0)
        sampler = Sampler("ddpm", guidance=guidance_scale, guidance_channels=guidance_channels)
        draws = "generator" in inspect.signature(scheduler.step).parameters
        extra = {"generator": generator} if draws else {}
        for t in self.progress_bar(scheduler.timesteps):
            seen = scheduler.scale_model_input(x, t) if hasattr(scheduler, "scale_model_input") else x
            times = t.to(x.device).expand(len(labels))
            predicted = guided(self._denoise, seen, times, labels, sampler, config.classes, config.channels)
            if not learnt:
                predicted = predicted[:, : config.channels]
            x = scheduler.step(predicted, t, x, **extra).prev_sample
        images = self._finish(x, output_type)
        self.maybe_free_model_hooks()
        return ImagePipelineOutput(images=images) if return_dict else (images,)

    def _denoise(self, x: Tensor, times: Tensor, labels: Tensor) -> Tensor:
        found: Tensor = self.transformer(x, times, labels, return_dict=False)[0]
        return found

    def label_numbers(self, labels: int | str | Sequence[int | str]) -> list[int]:
        """Labels as numbers; names are those of the training data."""
        names = self.config.class_names or []
        numbers = []
        for label in [labels] if isinstance(labels, (int, str)) else labels:
            if isinstance(label, str):
                if label not in names:
                    raise ValueError(f"class_labels: {label!r} is not known; it takes one of {', '.join(names) or '–'}")
                label = names.index(label)
            if not 0 <= int(label) < self.transformer.config.classes:
                most = self.transformer.config.classes - 1
                raise InteropError.not_allowed("class_labels", label, f"0 to {most}")
            numbers.append(int(label))
        return numbers

    def _ready_scheduler(self, steps: int) -> tuple[Any, bool]:
        """The scheduler with its timesteps, and whether it reads the variances behind a prediction."""
        scheduler = self.scheduler
        if isinstance(scheduler, FlowMatchEulerDiscreteScheduler):
            # Evenly from noise to image; the scheduler's own choice would end with a step of a thousandth.
            scheduler.set_timesteps(sigmas=torch.linspace(1, 1 / steps, steps).tolist())
            return scheduler, False
        learnt = scheduler.config.get("variance_type") in LEARNT
        if learnt and not isinstance(scheduler, DDPMScheduler):  # others know only variances behind three channels
            scheduler, learnt = type(scheduler).from_config(scheduler.config, variance_type=None), False
        scheduler.set_timesteps(steps)
        return scheduler, learnt

    def _finish(self, x: Tensor, output_type: str) -> Any:
        if output_type == "latent":
            return x
        if self.vae is not None:
            scale, shift = self.vae.config.scaling_factor, self.vae.config.shift_factor or 0.0
            x = self.vae.decode((x / scale + shift).to(self.vae.dtype)).sample
        images = (x / 2 + 0.5).clamp(0, 1)
        if output_type == "pt":
            return images
        arrays = images.cpu().permute(0, 2, 3, 1).float().numpy()
        return self.numpy_to_pil(arrays) if output_type == "pil" else arrays
