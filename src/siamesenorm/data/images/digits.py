"""The 1797 handwritten digits of 8×8 pixels that come with scikit-learn: images with no download and no file."""

from __future__ import annotations

import functools

import numpy as np

from siamesenorm.data.images.imageset import ArrayImages
from siamesenorm.errors import import_extra


@functools.lru_cache(maxsize=1)
def digits() -> ArrayImages:
    """All digits; grey levels 0 to 16 are spread over 0 to 255."""
    found = import_extra("sklearn.datasets", "the embedded set digits", "vision").load_digits()
    pixels = np.rint(found.images * (255 / 16)).astype(np.uint8)[..., None]
    return ArrayImages("digits", pixels, found.target.astype(np.int64), [str(digit) for digit in range(10)])
