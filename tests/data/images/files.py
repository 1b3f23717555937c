"""Image files made by hand, byte by byte where the format is that simple."""

import gzip
import io
import struct
from pathlib import Path

import numpy as np


def some_pixels(count, height, width, channels, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (count, height, width, channels), dtype=np.uint8)


def write_idx(path: Path, values: np.ndarray) -> None:
    content = struct.pack(f">BBBB{values.ndim}I", 0, 0, 8, values.ndim, *values.shape) + values.tobytes()
    path.write_bytes(gzip.compress(content) if path.suffix == ".gz" else content)


def png(pixels: np.ndarray) -> bytes:
    from PIL import Image

    out = io.BytesIO()
    Image.fromarray(pixels[..., 0] if pixels.shape[2] == 1 else pixels).save(out, "PNG")
    return out.getvalue()


def write_folder(root: Path, pixels, labels, names) -> None:
    for number, (image, label) in enumerate(zip(pixels, labels, strict=True)):
        (root / names[label]).mkdir(parents=True, exist_ok=True)
        (root / names[label] / f"{number:03}.png").write_bytes(png(image))
