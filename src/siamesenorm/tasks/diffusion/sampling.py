"""Samples by diffusers' schedulers (extra: diffusion), with classifier-free guidance (arXiv 2207.12598).

| sampler | scheduler                            | steps | noise in between                        |
|---------|--------------------------------------|-------|-----------------------------------------|
| ddpm    | DDPM                                 | 250   | yes, with the learnt variances if any   |
| ddim    | DDIM (arXiv 2010.02502)              | 50    | no                                      |
| dpm     | DPM-Solver++ (arXiv 2211.01095)      | 20    | no                                      |
| euler   | Euler's method, for flows            | 50    | no                                      |

Every sample has a generator of its own, so that it does not depend on the others of its batch.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from siamesenorm.errors import DataError, import_extra
from siamesenorm.tasks.diffusion.losses import FLOW_TIMESTEPS, Denoise
from siamesenorm.tasks.diffusion.process import Process
from siamesenorm.tasks.sharing import mixed_seed

SamplerName = Literal["ddpm", "ddim", "dpm", "euler"]
STEPS: dict[str, int] = {"ddpm": 250, "ddim": 50, "dpm": 20, "euler": 50}


@dataclass(frozen=True)
class Sampler:
    """How to sample: ``Sampler("ddim", steps=50, guidance=2.0)``.

    steps: None takes the sampler's default number, or all timesteps where there are fewer. guidance: 1 is none.
    guidance_channels: how many of the first channels are guided, None all. clip: hold predicted images within ±1 on
    the way (not euler), for pixels: at the noisiest timesteps small errors of a model are large ones of its image.
    """

    name: SamplerName = "ddpm"
    steps: int | None = None
    guidance: float = 1.0
    guidance_channels: int | None = None
    clip: bool = False

    def __post_init__(self) -> None:
        if self.name not in STEPS:
            raise DataError.unknown("sampler", self.name, STEPS)
        if self.steps is not None and self.steps < 1:
            raise DataError.not_allowed("steps", self.steps, "1 or more")
        if not 0 <= self.guidance < math.inf:
            raise DataError.not_allowed("guidance", self.guidance, "0 or more, and 1 is none")
        if self.guidance_channels is not None and self.guidance_channels < 1:
            raise DataError.not_allowed("guidance_channels", self.guidance_channels, "1 or more")

    def check(self, process: Process) -> None:
        """Raise if this sampler is not for such a process."""
        flow = process.prediction == "flow"
        if flow != (self.name == "euler"):
            allowed = "euler" if flow else ", ".join(name for name in STEPS if name != "euler")
            raise DataError.not_allowed("sampler", self.name, f"{allowed}", when=f"for {process.prediction}")
        if self.steps is not None and self.steps > self.most_steps(process):
            taken = f"{self.name} takes 1 to {self.most_steps(process)} of {process.timesteps} timesteps"
            raise DataError.refused("steps", self.steps, taken)

    def steps_for(self, process: Process) -> int:
        """Steps, resolved: the default number is no more than a process allows."""
        return self.steps or int(min(STEPS[self.name], self.most_steps(process)))

    def most_steps(self, process: Process) -> float:
        """A flow's time can be cut into any number; DPM-Solver's timesteps would fall together in the last one."""
        if process.prediction == "flow":
            return math.inf
        return process.timesteps - (self.name == "dpm")


def default_sampler(process: Process) -> SamplerName:
    """What a process is sampled with where nobody says: ddpm, or euler for a flow."""
    return "euler" if process.prediction == "flow" else "ddpm"


class Samples(NamedTuple):
    """Images as the model knows them, about -1 to 1, and the way there."""

    images: Tensor
    """(samples, channels, height, width)."""
    frames: list[Tensor]
    """As many states as were asked for, evenly spread from the noise to the images."""


@torch.no_grad()
def sample(
    denoise: Denoise,
    labels: Tensor,
    shape: tuple[int, ...],
    process: Process,
    sampler: Sampler,
    *,
    unconditional: int | None = None,
    seed: int = 0,
    first: int = 0,
    frames: int = 0,
    progress: Callable[[int], None] | None = None,
) -> Samples:
    """One image for each label.

    shape: of an image, (channels, height, width). unconditional: the label of no class, which guidance needs.
    seed, first: sample k of a call draws from generator (seed, first + k). frames: states to keep. progress: called
    with every step.
    """
    sampler.check(process)
    if sampler.guidance != 1 and unconditional is None:
        raise DataError.refused("guidance", sampler.guidance, "a model that saw every label takes 1")
    scheduler = make_scheduler(process, sampler)
    generators = [torch.Generator().manual_seed(mixed_seed(seed, first + k)) for k in range(len(labels))]
    x = torch.cat([torch.randn(1, *shape, generator=generator) for generator in generators]).to(labels.device)
    kept, wanted = [x], frame_steps(len(scheduler.timesteps), frames)
    takes_generator = sampler.name in ("ddpm", "ddim")
    for number, t in enumerate(scheduler.timesteps, start=1):
        times = t.to(x.device).expand(len(labels))
        predicted = guided(denoise, x, times, labels, sampler, unconditional, shape[0])
        if sampler.name != "ddpm":
            predicted = predicted[:, : shape[0]]
        extra: dict[str, Any] = {"generator": generators} if takes_generator else {}
        x = scheduler.step(predicted, t, x, **extra).prev_sample
        if number in wanted:
            kept.append(x)
        if progress is not None:
            progress(number)
    return Samples(x, kept if frames else [])


def guided(
    denoise: Denoise,
    x: Tensor,
    times: Tensor,
    labels: Tensor,
    sampler: Sampler,
    unconditional: int | None,
    channels: int,
) -> Tensor:
    """The prediction moved away from the unconditional one, in the guided channels; variances stay the class's own."""
    if sampler.guidance == 1:
        return denoise(x, times, labels).float()
    nobody = torch.full_like(labels, unconditional or 0)
    both = denoise(torch.cat([x, x]), torch.cat([times, times]), torch.cat([labels, nobody])).float()
    with_class, without = both.chunk(2)
    count = min(sampler.guidance_channels or channels, channels)
    moved = without[:, :count] + sampler.guidance * (with_class[:, :count] - without[:, :count])
    return torch.cat([moved, with_class[:, count:]], dim=1)


def make_scheduler(process: Process, sampler: Sampler) -> Any:
    """diffusers' scheduler with its timesteps set."""
    schedulers, steps = import_extra("diffusers", "sampling", "diffusion"), sampler.steps_for(process)
    if sampler.name == "euler":
        flow = schedulers.FlowMatchEulerDiscreteScheduler(num_train_timesteps=FLOW_TIMESTEPS, shift=1.0)
        flow.set_timesteps(sigmas=torch.linspace(1, 1 / steps, steps).tolist())
        return flow
    common: dict[str, Any] = {
        "num_train_timesteps": process.timesteps,
        "trained_betas": process.schedule.betas.numpy(),
        "prediction_type": "v_prediction" if process.prediction == "velocity" else "epsilon",
    }
    if sampler.name == "ddpm":
        variance = "learned_range" if process.learn_sigma else "fixed_small"
        # linspace is the official code's choice of timesteps for fewer steps than it was trained with.
        scheduler = schedulers.DDPMScheduler(
            **common, variance_type=variance, clip_sample=sampler.clip, timestep_spacing="linspace"
        )
    elif sampler.name == "ddim":
        scheduler = schedulers.DDIMScheduler(**common, clip_sample=sampler.clip, timestep_spacing="trailing")
    else:
        # With a largest value of 1, its thresholding is clipping.
        scheduler = schedulers.DPMSolverMultistepScheduler(
            **common, algorithm_type="dpmsolver++", solver_order=2, thresholding=sampler.clip, sample_max_value=1.0
        )
    scheduler.set_timesteps(steps)
    return scheduler


def frame_steps(steps: int, frames: int) -> Sequence[int]:
    """The steps after which a state is kept, the noise itself being the first frame and the last step the last."""
    return [round(steps * k / (frames - 1)) for k in range(1, frames)] if frames > 1 else []
