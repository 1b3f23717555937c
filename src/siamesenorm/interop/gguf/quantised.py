"""How numbers lie in GGUF files: plain, or in blocks of small whole numbers with a scale, which are undone here.

The layouts of 32 numbers per block are read by this package; the others by PyPI's ``gguf``, where it is installed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from siamesenorm.errors import InteropError

Array = np.ndarray[Any, np.dtype[Any]]


@dataclass(frozen=True)
class BlockLayout:
    """Numbers of a block, and the bytes that they take."""

    name: str
    numbers: int
    size: int
    dtype: torch.dtype = torch.float32

    def size_of(self, shape: tuple[int, ...]) -> int:
        """Bytes of a tensor of this shape."""
        if shape[-1] % self.numbers:
            raise ValueError(f"rows of {shape[-1]} numbers are no blocks of {self.numbers}")
        return math.prod(shape) // self.numbers * self.size


LAYOUTS = {
    0: BlockLayout("F32", 1, 4),
    1: BlockLayout("F16", 1, 2, torch.float16),
    30: BlockLayout("BF16", 1, 2, torch.bfloat16),
    2: BlockLayout("Q4_0", 32, 18),
    3: BlockLayout("Q4_1", 32, 20),
    8: BlockLayout("Q8_0", 32, 34),
    6: BlockLayout("Q5_0", 32, 22),
    7: BlockLayout("Q5_1", 32, 24),
    10: BlockLayout("Q2_K", 256, 84),
    11: BlockLayout("Q3_K", 256, 110),
    12: BlockLayout("Q4_K", 256, 144),
    13: BlockLayout("Q5_K", 256, 176),
    14: BlockLayout("Q6_K", 256, 210),
    20: BlockLayout("IQ4_NL", 32, 18),
    23: BlockLayout("IQ4_XS", 256, 136),
}
"""By the number that files have for them."""


def dequantise(content: Array, number: int, shape: tuple[int, ...]) -> Tensor:
    """The tensor of these bytes."""
    layout = LAYOUTS[number]
    if layout.numbers == 1:
        return torch.from_numpy(np.array(content)).view(layout.dtype).view(shape)
    blocks = np.asarray(content).reshape(-1, layout.size)
    if layout.name in BLOCKS:
        return torch.from_numpy(BLOCKS[layout.name](blocks).reshape(shape))
    with InteropError.importing(f"source: to read {layout.name}, it", "gguf", "gguf"):
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize
    return torch.from_numpy(dequantize(blocks, GGMLQuantizationType(number)).reshape(shape).astype(np.float32))


def halves(blocks: Array, count: int) -> Array:
    """The first `count` numbers of every block, in half precision, as columns."""
    return blocks[:, : 2 * count].copy().view(np.float16).astype(np.float32)


def nibbles(packed: Array) -> Array:
    """Two whole numbers a byte: the lower halves of all bytes, then the upper ones."""
    return np.concatenate([packed & 15, packed >> 4], axis=1).astype(np.float32)


def q8_0(blocks: Array) -> Array:
    """d q."""
    return halves(blocks, 1) * blocks[:, 2:].copy().view(np.int8).astype(np.float32)


def q4_0(blocks: Array) -> Array:
    """d (q − 8)."""
    return halves(blocks, 1) * (nibbles(blocks[:, 2:]) - 8)


def q4_1(blocks: Array) -> Array:
    """d q + m."""
    scales = halves(blocks, 2)
    return scales[:, :1] * nibbles(blocks[:, 4:]) + scales[:, 1:]


BLOCKS: dict[str, Callable[[Array], Array]] = {"Q8_0": q8_0, "Q4_0": q4_0, "Q4_1": q4_1}
