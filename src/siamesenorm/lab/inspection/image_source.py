"""What the command line inspects of a run on images: its model, some of its held-out images, and its loss."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from siamesenorm.errors import InspectionError
from siamesenorm.lab.inspection.subject import LossFunction
from siamesenorm.models.dit import DiT
from siamesenorm.models.vit import VisionTransformer
from siamesenorm.tasks import find_task
from siamesenorm.tasks.images import ImageTask
from siamesenorm.train.trained import open_trained


def open_images_of(
    folder: Path, task_name: str, tokens: int
) -> tuple[nn.Module, dict[str, Tensor], dict[str, Any], LossFunction | None]:
    """The model of a run, held-out images of about so many tokens, what both are, and the loss of a diffusion."""
    trained = open_trained(folder, task_name)
    model, config = trained.model, trained.config
    assert isinstance(model, (DiT, VisionTransformer))
    count = max(1, round(tokens / model.config.tokens))
    spread = config.evaluation.model_copy(update={"images": count})
    task = find_task(task_name).for_evaluation(config.model_copy(update={"evaluation": spread}))
    assert isinstance(task, ImageTask)
    if task.held_out is None:
        raise InspectionError(f"run: {str(folder)!r} has no held-out images")
    batch = next(task.held_out.batches(count))
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    facts = {
        "kind": "run",
        "folder": str(folder),
        "step": trained.step,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "images": len(batch["label"]),
        "image_set": task.held_out.images.name,
        "images_sha256": task.held_out.images.fingerprint,
        "device": device.type,
    }
    # A classifier's loss and predictions are known by its kind; how a diffusion is trained is the task's to say.
    loss = None if isinstance(model, VisionTransformer) else lambda model, batch: task.loss(model, batch).total
    return model.to(device), batch, facts, loss
