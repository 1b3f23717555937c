"""Learning from a teacher: who it is, and the loss of the distillation token (DeiT, arXiv 2012.12877)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from siamesenorm.data.images.timm_transforms import import_timm
from siamesenorm.data.reading import named_path, reason_of
from siamesenorm.data.tensors import read_tensors
from siamesenorm.errors import DataError

TIMM = "timm:"
RUNS: list[Callable[[str], nn.Module]] = []
"""How the classifier of a run folder is opened; the room that knows run folders puts it here."""


def distillation_loss(student: Tensor, teacher: Tensor, kind: str, tau: float) -> Tensor:
    """hard: cross-entropy with the teacher's class; soft: KL divergence at temperature tau, times tau².

    As in DeiT's code the soft loss is a mean over images and classes, not over images.
    """
    if kind == "hard":
        return F.cross_entropy(student, teacher.argmax(dim=1))
    divergence = F.kl_div(
        F.log_softmax(student / tau, dim=1), F.log_softmax(teacher / tau, dim=1), reduction="sum", log_target=True
    )
    return divergence * tau**2 / student.numel()


def open_teacher(name: str, weights: str | None, classes: int) -> nn.Module:
    """A frozen classifier: of a run folder, or timm's by name with weights from a safetensors file."""
    model = _timm_teacher(name.removeprefix(TIMM), weights, classes) if name.startswith(TIMM) else _run_teacher(name)
    found = getattr(getattr(model, "config", None), "classes", None) or getattr(model, "num_classes", None)
    if found != classes:
        raise DataError(f"loss.teacher: {name!r} has {found} classes; it takes one of model.classes = {classes}")
    return model.requires_grad_(False).eval()


def _run_teacher(name: str) -> nn.Module:
    if not named_path(name, "loss.teacher").is_dir() or not RUNS:
        raise DataError(f"loss.teacher: {name!r} is neither a run folder nor {TIMM}NAME")
    return RUNS[0](name)


def _timm_teacher(name: str, weights: str | None, classes: int) -> nn.Module:
    timm: Any = import_timm("timm", "a teacher of timm")
    if not timm.is_model(name):
        raise DataError(f"loss.teacher: timm does not know the model {name!r}")
    if weights is None:
        model: nn.Module = timm.create_model(name, pretrained=True)
        return model
    model = timm.create_model(name, pretrained=False, num_classes=classes)
    tensors, _ = read_tensors(weights, "loss.teacher_weights")
    try:
        model.load_state_dict(tensors)
    except RuntimeError as error:
        raise DataError(f"loss.teacher_weights: {weights!r} does not fit {name}: {reason_of(error)}") from None
    return model


class Teacher:
    """A teacher that is opened once and goes where the images are; it is no part of the trained model."""

    def __init__(self, name: str, weights: str | None, classes: int) -> None:
        self.model = open_teacher(name, weights, classes)

    @torch.no_grad()
    def logits(self, images: Tensor) -> Tensor:
        """What it says of images."""
        self.model.to(images.device)
        found: Tensor = self.model(images)
        return found
