"""A name for weights that changes with any of them."""

from __future__ import annotations

import hashlib

import torch
from torch import nn


def weights_hash(module: nn.Module) -> str:
    """SHA-256 of a module's weights by name."""
    digest = hashlib.sha256()
    for name, tensor in module.state_dict().items():
        if not name.endswith("num_batches_tracked"):
            digest.update(f"{name} {tuple(tensor.shape)} ".encode())
            digest.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
