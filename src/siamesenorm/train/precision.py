"""Precision of matrix products: autocast around forward, the loss scale that fp16 needs, TF32."""

from __future__ import annotations

import contextlib
from typing import Any

import torch

from siamesenorm.train.config import StepsConfig

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}


class Precision:
    """fp32 as it is; bf16 and fp16 by autocast, so that weights, gradients and moments stay in fp32."""

    def __init__(self, config: StepsConfig, device: torch.device) -> None:
        self.device, self.dtype = device, DTYPES.get(config.precision)
        scaled = config.precision == "fp16"
        self.scaler = torch.amp.GradScaler(device.type, enabled=scaled, init_scale=2.0**16) if scaled else None
        self.tf32 = config.tf32 and has_tf32(device)
        self._before: str | None = None
        self._open = False  # gradients were unscaled, and their step is neither taken nor left out yet

    def open(self) -> None:
        """Set what fp32 matrix products run in, for all of the process, until `close`.

        By the older of PyTorch's two ways: having used the newer one, its compiler fails where it asks by the older.
        A program that has used the newer one keeps its choice.
        """
        if self.device.type == "cuda":
            with contextlib.suppress(RuntimeError):
                self._before = torch.get_float32_matmul_precision()
                torch.set_float32_matmul_precision("high" if self.tf32 else "highest")

    def close(self) -> None:
        """Set it back."""
        if self._before is not None:
            torch.set_float32_matmul_precision(self._before)
            self._before = None

    @property
    def gathered(self) -> torch.dtype | None:
        """What sharded blocks are sent between processes in; None: as they are. fp16 gradients need their scale."""
        return self.dtype if self.dtype is torch.bfloat16 else None

    def autocast(self) -> contextlib.AbstractContextManager[Any]:
        """Around every forward pass."""
        return autocast(self.device.type, self.dtype)

    def scaled(self, loss: torch.Tensor) -> torch.Tensor:
        """The loss as backward takes it, scaled where small gradients would vanish."""
        return loss if self.scaler is None else self.scaler.scale(loss)

    def unscale(self, optimizer: torch.optim.Optimizer) -> None:
        """Gradients at their own size again, before they are clipped; a step that was not taken before is left out."""
        if self.scaler is not None:
            if self._open:
                self._set_scale(self.scaler.get_scale())
            self.scaler.unscale_(optimizer)
            self._open = True

    def lower_scale(self) -> bool:
        """After an overflow: whether a lower scale is there to try next, in which case the step is only left out."""
        if self.scaler is None or self.scaler.get_scale() <= 1.0:
            return False
        self._set_scale(self.scaler.get_scale() / 2)
        return True

    def _set_scale(self, scale: float) -> None:
        """The scale of the next step; the scaler forgets what it found in the gradients of this one."""
        assert self.scaler is not None
        self.scaler.update(scale)
        self._open = False

    def step(self, optimizer: torch.optim.Optimizer) -> None:
        """The optimiser's step, of which all gradients are known to be finite."""
        if self.scaler is None:
            optimizer.step()
        else:
            self.scaler.step(optimizer)
            self.scaler.update()
            self._open = False

    def state(self) -> dict[str, Any]:
        """The scale and its history."""
        return {} if self.scaler is None else dict(self.scaler.state_dict())

    def load(self, state: dict[str, Any]) -> None:
        """Go on with a saved scale."""
        if self.scaler is not None and state:
            self.scaler.load_state_dict(state)


def autocast(device: str, dtype: torch.dtype | None) -> contextlib.AbstractContextManager[Any]:
    """torch's own, or nothing where there is no lower precision."""
    return contextlib.nullcontext() if dtype is None else torch.autocast(device, dtype=dtype)


def has_tf32(device: torch.device) -> bool:
    """Whether a device multiplies in TF32: NVIDIA's from compute capability 8.0 on."""
    return device.type == "cuda" and torch.version.hip is None and torch.cuda.get_device_capability(device) >= (8, 0)
