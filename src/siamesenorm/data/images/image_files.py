"""Image files to arrays and back, through pillow (extra: vision)."""

from __future__ import annotations

import io
import warnings
from pathlib import Path
from typing import Any

import numpy as np

from siamesenorm.data.images.imageset import MOST_PIXELS, Pixels
from siamesenorm.data.reading import reason_of
from siamesenorm.errors import DataError, import_extra

ENDINGS = (".png", ".jpg", ".jpeg", ".bmp", ".gif", ".webp", ".tif", ".tiff", ".ppm", ".pgm")
FORMATS = ("PNG", "JPEG", "BMP", "GIF", "WEBP", "TIFF", "PPM")
"""What pillow may try; others of its readers start outside programs."""
MODES = {1: "L", 3: "RGB"}


def decode(content: bytes | Path, place: str, channels: int = 3) -> Pixels:
    """An image file as (height, width, channels): red, green and blue, or one channel of grey."""
    image_module = import_extra("PIL.Image", "reading image files", "vision")
    source: Any = io.BytesIO(content) if isinstance(content, bytes) else content
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # pillow warns of large images; the limit here is our own
            with image_module.open(source, formats=FORMATS) as image:
                if image.width * image.height > MOST_PIXELS:
                    raise DataError(f"images: {place!r} has {image.width} × {image.height} pixels, which is too many")
                if image.mode.startswith("I;16"):  # pillow would cut off at 255 instead of scaling
                    pixels = as_channels((np.asarray(image) >> 8).astype(np.uint8)[..., None], channels)
                else:
                    pixels = np.asarray(image.convert(MODES[channels]))
    except DataError:
        raise
    except image_module.UnidentifiedImageError:
        raise DataError(f"images: {place!r} is not a sound image: it is of none of {', '.join(FORMATS)}") from None
    except Exception as error:  # pillow raises many kinds for damaged files
        raise DataError(f"images: {place!r} is not a sound image: {reason_of(error, 160)}") from None
    return pixels if pixels.ndim == 3 else pixels[..., None]


def as_channels(pixels: Pixels, channels: int) -> Pixels:
    """The same image in grey, or with grey three times."""
    if pixels.shape[2] == channels:
        return pixels
    if channels == 3:
        return np.repeat(pixels, 3, axis=2)
    return np.rint(pixels @ np.array([0.299, 0.587, 0.114])).astype(np.uint8)[..., None]
