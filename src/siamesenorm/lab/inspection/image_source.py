"""What the command line inspects of a classifier: the model of a run, and some of its held-out images."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from siamesenorm.lab.inspection.errors import InspectionError
from siamesenorm.models.vit import VisionTransformer
from siamesenorm.tasks.classification import ClassificationTask
from siamesenorm.train.trained import open_trained


def open_images_of(folder: Path, tokens: int) -> tuple[VisionTransformer, dict[str, Tensor], dict[str, Any]]:
    """The model of a classification run, held-out images of about so many tokens, and what both are."""
    trained = open_trained(folder, "classification")
    model, config = trained.model, trained.config
    assert isinstance(model, VisionTransformer)
    count = max(1, round(tokens / model.config.tokens))
    spread = config.evaluation.model_copy(update={"images": count})
    task = ClassificationTask.for_evaluation(config.model_copy(update={"evaluation": spread}))
    assert isinstance(task, ClassificationTask)
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
    return model.to(device), batch, facts
