"""Diffusion: class-conditional images by denoising, from schedule and loss to samples.

::

    process = Process()                                        # epsilon, linear betas, 1000 timesteps
    process.loss(model, images, labels, draw)                  # means of what is learnt
    sample(model, labels, shape, process, Sampler("ddim", 50, guidance=2.0), seed=0).images
"""

from siamesenorm.tasks.diffusion.losses import Losses, flow_losses, gaussian_losses
from siamesenorm.tasks.diffusion.process import Process
from siamesenorm.tasks.diffusion.sampling import Sampler, sample
from siamesenorm.tasks.diffusion.schedule import Schedule

__all__ = ["Losses", "Process", "Sampler", "Schedule", "flow_losses", "gaussian_losses", "sample"]
