"""GGUF files made by hand, byte by byte: no code of the reader's, and none of the package that others write with."""

from __future__ import annotations

import struct
from pathlib import Path

import torch

F32, F16, BF16, Q4_0, Q4_1, Q8_0 = 0, 1, 30, 2, 3, 8
PLAIN = {F32: torch.float32, F16: torch.float16, BF16: torch.bfloat16}


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def typed(value) -> bytes:
    """A value of metadata behind the number of its kind."""
    if isinstance(value, bool):
        return struct.pack("<I?", 7, value)
    if isinstance(value, int):
        return struct.pack("<Ii" if value < 0 else "<II", 5 if value < 0 else 4, value)
    if isinstance(value, float):
        return struct.pack("<If", 6, value)
    if isinstance(value, str):
        return struct.pack("<I", 8) + text(value)
    items = [typed(item) for item in value] or [struct.pack("<I", 8)]
    return struct.pack("<I", 9) + items[0][:4] + struct.pack("<Q", len(value)) + b"".join(item[4:] for item in items)


def packed(tensor: torch.Tensor, layout: int) -> tuple[bytes, torch.Tensor]:
    """The bytes of a tensor, and the values that they stand for."""
    if layout in PLAIN:
        kept = tensor.to(PLAIN[layout])
        return kept.contiguous().view(torch.uint8).numpy().tobytes(), kept.float()
    content, values = b"", []
    for block in tensor.float().reshape(-1, 32):
        low, scale = 0.0, block.abs().max().item() / (127 if layout == Q8_0 else 7)
        if layout == Q4_1:
            low, scale = block.min().item(), (block.max() - block.min()).item() / 15
        low, scale = (struct.unpack("<e", struct.pack("<e", number))[0] for number in (low, scale))
        whole = ((block - low) / scale).round().int()
        values.append(whole.float() * torch.tensor(scale) + torch.tensor(low))
        content += struct.pack("<e", scale) + (struct.pack("<e", low) if layout == Q4_1 else b"")
        if layout == Q8_0:
            content += struct.pack("<32b", *whole.tolist())
        else:
            nibbles = (whole + (8 if layout == Q4_0 else 0)).clamp(0, 15).tolist()
            content += bytes(nibbles[i] | nibbles[i + 16] << 4 for i in range(16))
    return content, torch.stack(values).view(tensor.shape)


def write_gguf(path: Path, metadata: dict, tensors: dict[str, tuple[torch.Tensor, int]]) -> dict[str, torch.Tensor]:
    """A file of these tensors in these layouts; returns what is in it."""
    pairs = b"".join(text(name) + typed(value) for name, value in metadata.items())
    listed, content, values = b"", b"", {}
    for name, (tensor, layout) in tensors.items():
        shape = tuple(reversed(tensor.shape))
        listed += text(name) + struct.pack(f"<I{len(shape)}QIQ", len(shape), *shape, layout, len(content))
        made, values[name] = packed(tensor, layout)
        content += made + bytes(-len(made) % 32)
    header = b"GGUF" + struct.pack("<IQQ", 3, len(tensors), len(metadata)) + pairs + listed
    path.write_bytes(header + bytes(-len(header) % 32) + content)
    return values
