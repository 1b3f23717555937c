"""torchvision (and so timm) beside a torch it was not built for.

A CUDA build of torchvision beside a CPU build of torch cannot load its compiled extension, and its import then ends
with "operator torchvision::nms does not exist", because it describes shapes of operators that nobody defined.
Nothing of image classification uses them; declaring them is enough to import the rest.
"""

from __future__ import annotations

import functools
import importlib.util
from pathlib import Path

import torch

OPERATORS = ("nms", "qnms")
SCHEMA = "(Tensor dets, Tensor scores, float iou_threshold) -> Tensor"


_kept: list[torch.library.Library] = []  # a library's operators live as long as it does


@functools.cache
def declare_missing_ops() -> bool:
    """Declare the operators that torchvision's import asks for, if its own extension cannot; whether it was needed.

    Call it before the first import of torchvision, timm or what imports them. Where torchvision is missing or
    whole, it does nothing.
    """
    spec = importlib.util.find_spec("torchvision")
    if spec is None or spec.origin is None or _loads_extension(Path(spec.origin).parent):
        return False
    library = torch.library.Library("torchvision", "FRAGMENT")
    for name in OPERATORS:
        if not hasattr(torch.ops.torchvision, name):
            library.define(name + SCHEMA)
    _kept.append(library)
    return True


def _loads_extension(folder: Path) -> bool:
    """Load the compiled operators as torchvision itself does."""
    built = sorted(folder.glob("_C*.so")) + sorted(folder.glob("_C*.pyd"))
    if not built:
        return False
    try:
        torch.ops.load_library(str(built[0]))
    except (OSError, RuntimeError):
        return False
    return True
