"""Copies of a run's tensors on the host, made while its device goes on."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor


class Staged:
    """Named tensors as they are now; whoever made it may change them at once.

    ::

        copies = Staged(tensors)       # waits for nothing
        ...                            # in another thread, while training goes on
        write(copies.arrived())

    From a GPU they are copied in the order of its work, so that the steps behind come too late to change them. They
    go into pinned memory, which PyTorch takes for a copy that is not waited for and keeps for the next one.
    """

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        self._copies = {
            name: tensor.detach().to("cpu", non_blocking=True, copy=True) for name, tensor in tensors.items()
        }
        devices = {tensor.device for tensor in tensors.values() if tensor.device.type == "cuda"}
        self._under_way = [torch.cuda.current_stream(device).record_event() for device in devices]

    def arrived(self) -> dict[str, Tensor]:
        """The copies, when they are complete."""
        for event in self._under_way:
            event.synchronize()
        return self._copies
