"""Samples as pictures to look at: a grid with a row for each class, a strip of the way from noise, single files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from siamesenorm.data.atomic import write_whole
from siamesenorm.data.images.image_files import as_channels
from siamesenorm.errors import import_extra
from siamesenorm.tasks.fidelity.image_batches import Images as Images

SEEN = 48
"""Smaller images are enlarged by whole pixels until they are about this large."""
GAP, PAPER, INK = 2, 255, 40


def grid(rows: Sequence[Images], names: Sequence[str]) -> Images:
    """One picture (height, width, channels): a row of images for each name, which stands at its left."""
    size, channels = max(rows[0].shape[1:3]), rows[0].shape[3]
    factor = max(1, round(SEEN / size))
    shown = [np.repeat(np.repeat(row, factor, axis=1), factor, axis=2) for row in rows]
    height, width = shown[0].shape[1:3]
    margin = _text_width(names) + 3 * GAP
    columns = max(len(row) for row in shown)
    shape = (GAP + len(shown) * (height + GAP), margin + columns * (width + GAP), channels)
    picture = np.full(shape, PAPER, dtype=np.uint8)
    for line, row in enumerate(shown):
        top = GAP + line * (height + GAP)
        for place, image in enumerate(row):
            left = margin + place * (width + GAP)
            picture[top : top + height, left : left + width] = image
    return _labelled(picture, names, height + GAP)


def _text_width(names: Sequence[str]) -> int:
    drawing: Any = import_extra("PIL.ImageDraw", "drawing grids", "diffusion")
    module: Any = import_extra("PIL.Image", "drawing grids", "diffusion")
    pen = drawing.Draw(module.new("L", (1, 1)))
    return max((int(pen.textlength(name)) for name in names), default=0)


def _labelled(picture: Images, names: Sequence[str], step: int) -> Images:
    drawing: Any = import_extra("PIL.ImageDraw", "drawing grids", "diffusion")
    module: Any = import_extra("PIL.Image", "drawing grids", "diffusion")
    canvas = module.fromarray(as_channels(picture, 3))
    pen = drawing.Draw(canvas)
    for line, name in enumerate(names):
        pen.text((GAP, GAP + line * step + step // 2 - 6), name, fill=(INK, INK, INK))
    return np.asarray(canvas, dtype=np.uint8)


def png(picture: Images) -> bytes:
    """A picture (height, width, channels) as a PNG file's content."""
    module: Any = import_extra("PIL.Image", "writing pictures", "diffusion")
    file = io.BytesIO()
    module.fromarray(picture[..., 0] if picture.shape[-1] == 1 else picture).save(file, format="PNG", optimize=True)
    return file.getvalue()


def save_png(picture: Images, path: Path) -> None:
    """Write a picture, whole or not at all."""
    write_whole(path, png(picture))
