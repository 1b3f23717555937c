"""A name for weights that changes with any of them."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping

import torch
from torch import Tensor, nn


def weights_hash(module: nn.Module) -> str:
    """SHA-256 of a module's weights by name."""
    weights = module.state_dict().items()
    return tensors_hash({name: tensor for name, tensor in weights if not name.endswith("num_batches_tracked")})


def tensors_hash(tensors: Mapping[str, Tensor]) -> str:
    """SHA-256 of tensors by name, in their order."""
    digest = hashlib.sha256()
    for name, tensor in tensors.items():
        digest.update(f"{name} {tuple(tensor.shape)} ".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()
