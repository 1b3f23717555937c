"""A trained DiT for users of diffusers (extra: diffusion): a model, a pipeline, and the way there from a run.

import siamesenorm.interop.diffusers  # makes the classes known to diffusers
pipeline = DiffusionPipeline.from_pretrained("digits/")
pipeline(class_labels=[3, "7"], guidance_scale=2.0).images[0]
"""

from siamesenorm.errors import check_torchvision

try:
    check_torchvision()
    import diffusers as _diffusers
except ImportError as error:
    raise ImportError("diffusers is needed here: pip install 'siamesenorm[diffusion]'", name=error.name) from None

from siamesenorm.interop.diffusers.exporter import export
from siamesenorm.interop.diffusers.model import ResidualDiTModel
from siamesenorm.interop.diffusers.pipeline import ResidualDiTPipeline

# `DiffusionPipeline.from_pretrained` looks for the class that a folder names among those of diffusers.
setattr(_diffusers, ResidualDiTPipeline.__name__, ResidualDiTPipeline)

__all__ = ["ResidualDiTModel", "ResidualDiTPipeline", "export"]
