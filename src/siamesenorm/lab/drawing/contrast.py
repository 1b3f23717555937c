"""Digits that can be read on any colour: contrast as WCAG 2 defines it."""

from __future__ import annotations

import importlib
from typing import Any

READABLE = 4.5
"""Contrast from which on text of any size can be read (WCAG 2, level AA)."""
INKS = ("#000000", "#ffffff")
"""One of them has a contrast above 4.5 on every colour."""
SCALE = "Viridis"
"""The colour scale of heat maps."""


def on_scale(share: float) -> str:
    """The colour at a share from 0 to 1 of `SCALE`, mixed as plotly does."""
    (channels,) = _colours().sample_colorscale(SCALE, [min(max(share, 0.0), 1.0)], colortype="tuple")
    return "#" + "".join(f"{round(255 * channel):02x}" for channel in channels)


def contrast(one: str, other: str) -> float:
    """From 1, the same colour, to 21, black on white."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    """Relative luminance of ``#rrggbb``."""
    shares = [channel / 255 for channel in _colours().hex_to_rgb(colour)]
    red, green, blue = (s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def ink(colour: str) -> str:
    """Black or white, whichever is easier to read on a colour."""
    return max(INKS, key=lambda one: contrast(one, colour))


def _colours() -> Any:
    return importlib.import_module("plotly.colors")
