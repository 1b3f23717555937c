"""How fast a device could be, so that a run can say how much of it is used."""

from __future__ import annotations

import time

import torch

from siamesenorm.train.distributed import World

PEAKS = {
    # Dense FLOPs a second by the makers' data sheets: bfloat16/float16, and float32. TF32 has half of the first.
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
SIZE = 256
"""A product of a third of a millisecond, which fits between the turns that other programs take."""
SECONDS = 0.05


class Peak:
    """FLOPs a second that all devices of a run could do together, and what share of them is used."""

    def __init__(self, flops: float, *, measured: bool = False) -> None:
        self.flops, self.measured = flops, measured

    @classmethod
    def of(
        cls, world: World, dtype: torch.dtype | None, given: float | None = None, *, tf32: bool = False
    ) -> Peak | None:
        """Of so much a device as was given, or is known of GPUs, or is measured on a CPU; None where none is."""
        device = given or (known_gpu(dtype, tf32) if world.device.type == "cuda" else None)
        if device is not None:
            return cls(device * world.size)
        return cls(measure_cpu(dtype) * world.size, measured=True) if world.device.type == "cpu" else None

    def share(self, flops: float) -> float:
        """The share that so many FLOPs a second are; what was measured too low is put right by what is seen."""
        if self.measured:
            self.flops = max(self.flops, flops)
        return flops / self.flops


def known_gpu(dtype: torch.dtype | None, tf32: bool = False) -> float | None:
    """What the data sheet of this process's GPU says; tf32: of float32 in TF32."""
    name = torch.cuda.get_device_name()
    low, full = next((peaks for known, peaks in PEAKS.items() if known in name), (None, None))
    if dtype is not None or low is None:
        return low
    return low / 2 if tf32 else full


def measure_cpu(dtype: torch.dtype | None = None) -> float:
    """The fastest of many small matrix products on one thread, times the threads that training has.

    Threads wait for each other, so that a product on all of them is as slow as the one that other programs disturb:
    on two busy cores it showed a tenth of what they do when they are free.
    """
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        return threads * _fastest(dtype or torch.float32)
    finally:
        torch.set_num_threads(threads)


def _fastest(dtype: torch.dtype) -> float:
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
