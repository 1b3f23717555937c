"""How fast a device could be, so that a run can say how much of it is used."""

from __future__ import annotations

import time

import torch

PEAKS = {
    # Dense FLOPs a second by the makers' data sheets: bfloat16/float16, and float32 (TF32 not counted).
    "B200": (2.25e15, 7.5e13),
    "H200": (9.89e14, 6.7e13),
    "H100 PCIe": (7.56e14, 5.1e13),
    "H100": (9.89e14, 6.7e13),
    "A100": (3.12e14, 1.95e13),
    "L40S": (3.62e14, 9.16e13),
    "A10": (1.25e14, 3.12e13),
    "L4": (1.21e14, 3.03e13),
    "V100": (1.25e14, 1.57e13),
    "T4": (6.5e13, 8.1e12),
    "RTX 4090": (1.65e14, 8.26e13),
    "RTX 3090": (7.1e13, 3.56e13),
    "MI300X": (1.307e15, 1.634e14),
    "MI250X": (1.915e14, 4.79e13),
}
SIZE = 512
SECONDS = 0.1


def peak_flops(device: torch.device, dtype: torch.dtype | None) -> float | None:
    """FLOPs a second of one device: known for GPUs, measured on a CPU; None where neither is possible."""
    if device.type == "cuda":
        name = torch.cuda.get_device_name(device)
        low = dtype is not None
        return next((peaks[0 if low else 1] for known, peaks in PEAKS.items() if known in name), None)
    return measure_cpu(dtype or torch.float32) if device.type == "cpu" else None


def measure_cpu(dtype: torch.dtype) -> float:
    """The fastest of several matrix products on the threads that training has."""
    a, b = torch.randn(SIZE, SIZE).to(dtype), torch.randn(SIZE, SIZE).to(dtype)
    best, end = float("inf"), time.perf_counter() + SECONDS
    torch.mm(a, b)
    while True:
        start = time.perf_counter()
        torch.mm(a, b)
        now = time.perf_counter()
        best = min(best, now - start)
        if now > end:
            return 2 * SIZE**3 / best
