"""GPUs by the makers' data sheets, and how much of these figures a plan counts on.

None of this was measured here: nothing of this package has run on a GPU yet (docs/hardware.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, fields, replace

from siamesenorm.errors import ConfigError
from siamesenorm.train.speed import PEAKS

GB = 1e9


def gib(size: float) -> str:
    """Bytes in GiB."""
    return f"{size / 2**30:,.1f} GiB"


@dataclass(frozen=True)
class GPU:
    """One GPU in a machine of several."""

    name: str
    flops: float
    """Dense bfloat16 FLOPs a second."""
    flops_fp32: float
    """The same of float32, in TF32 where there is one."""
    memory: float
    """Bytes."""
    bandwidth: float
    """Bytes a second, of its memory."""
    link: float
    """Bytes a second, one way, to the other GPUs of its machine."""
    network: float
    """Bytes a second, one way, to other machines: its share of what is usual there."""
    machine: int
    """GPUs in a machine."""
    source: str


def _gpu(name: str, known: str, memory: float, bandwidth: float, link: float, network: float, source: str) -> GPU:
    low, full = PEAKS[known]
    has_tf32 = not known.startswith("MI")
    return GPU(
        name, low, low / 2 if has_tf32 else full, memory * GB, bandwidth * GB, link * GB, network * GB, 8, source
    )


GPUS = {
    gpu.name: gpu
    for gpu in (
        _gpu("l4", "L4", 24, 300, 32, 12.5, "NVIDIA L4 data sheet; PCIe 4.0 x16"),
        _gpu("rtx4090", "RTX 4090", 24, 1008, 32, 12.5, "NVIDIA Ada GPU architecture white paper; PCIe 4.0 x16"),
        _gpu("l40s", "L40S", 48, 864, 32, 12.5, "NVIDIA L40S data sheet; PCIe 4.0 x16"),
        _gpu("a100-40gb", "A100", 40, 1555, 300, 25, "NVIDIA A100 data sheet, SXM 40 GB; NVLink 3"),
        _gpu("a100", "A100", 80, 2039, 300, 25, "NVIDIA A100 data sheet, SXM 80 GB; NVLink 3"),
        _gpu("h100", "H100", 80, 3350, 450, 50, "NVIDIA H100 data sheet, SXM; NVLink 4"),
        _gpu("h200", "H200", 141, 4800, 450, 50, "NVIDIA H200 data sheet, SXM; NVLink 4"),
        _gpu("b200", "B200", 180, 8000, 900, 50, "NVIDIA DGX B200 data sheet; NVLink 5"),
        _gpu("mi300x", "MI300X", 192, 5300, 448, 50, "AMD Instinct MI300X data sheet; seven Infinity Fabric links"),
        _gpu("mi325x", "MI300X", 256, 6000, 448, 50, "AMD Instinct MI325X data sheet; seven Infinity Fabric links"),
    )
}
"""By the name that ``--gpu`` takes. The network is a card of 400 Gbit/s a GPU (h100 and later), 200 or 100."""


@dataclass(frozen=True)
class Assumptions:
    """What share of a data sheet's figures a run is thought to reach; every one can be set."""

    matmul: float = 0.6
    """Of peak FLOPs, by matrix products and attention."""
    bandwidth: float = 0.7
    """Of the memory's bandwidth, by everything else, each operator reading and writing by itself."""
    fusion: float = 0.5
    """What is left of those reads and writes where blocks are compiled."""
    network: float = 0.7
    """Of links and network, by collectives."""
    overlap: float = 0.7
    """Of computing time, in which weights and gradients are sent beside it; sums of tensor groups are waited for."""
    latency: float = 1e-5
    """Seconds of a collective, times the logarithm of its processes."""
    usable: float = 0.92
    """Of a GPU's memory: the rest is the driver's, the libraries' and lost between blocks of the allocator."""

    def sentence(self) -> str:
        """All of them, in words."""
        return (
            f"assumed: {self.matmul:.0%} of peak FLOPs in matrix products, {self.bandwidth:.0%} of memory bandwidth in "
            f"the rest ({self.fusion:.0%} of it left by torch.compile), {self.network:.0%} of links and network, "
            f"weights and gradients sent beside {self.overlap:.0%} of computing, {self.usable:.0%} of memory usable"
        )


def assumptions(changes: Iterable[str]) -> Assumptions:
    """The defaults, changed by ``name=value``."""
    known = {field.name for field in fields(Assumptions)}
    values: dict[str, float] = {}
    for text in changes:
        name, _, value = text.partition("=")
        if name not in known:
            raise ConfigError.unknown_name("--assume", name, sorted(known))
        try:
            values[name] = float(value)
        except ValueError:
            values[name] = -1.0
        if not 0 <= values[name] <= 1 or (values[name] == 0 and name not in ("overlap", "latency")):
            raise ConfigError(f"--assume: {name}={value} is not allowed; it takes a number above 0 and up to 1")
    return Assumptions(**values)


def find_gpu(name: str, machine: int | None = None) -> GPU:
    """The GPU of a name; machine: how many there are in a machine, where that is not 8."""
    found = GPUS.get(name.lower())
    if found is None:
        raise ConfigError.unknown_name("--gpu", name, GPUS)
    return found if machine is None else replace(found, machine=machine)
