"""Digits that can be read on any colour: contrast as WCAG 2 defines it, and scales whose colours are known."""

from __future__ import annotations

from collections.abc import Sequence

READABLE = 4.5
"""Contrast from which on text of any size can be read (WCAG 2, level AA)."""
INKS = ("#000000", "#ffffff")
"""One of them has a contrast above 4.5 on every colour."""
VIRIDIS = (
    "#440154",
    "#482878",
    "#3e4989",
    "#31688e",
    "#26828e",
    "#1f9e89",
    "#35b779",
    "#6ece58",
    "#b5de2b",
    "#fde725",
)


def scale(colours: Sequence[str] = VIRIDIS) -> list[list[float | str]]:
    """A colour scale of plotly, evenly spaced."""
    return [[place / (len(colours) - 1), colour] for place, colour in enumerate(colours)]


def on_scale(share: float, colours: Sequence[str] = VIRIDIS) -> str:
    """The colour at a share from 0 to 1 of the scale, mixed as plotly does."""
    place = min(max(share, 0.0), 1.0) * (len(colours) - 1)
    low = min(int(place), len(colours) - 2)
    pairs = zip(_channels(colours[low]), _channels(colours[low + 1]), strict=True)
    return "#" + "".join(f"{round(one + (place - low) * (other - one)):02x}" for one, other in pairs)


def contrast(one: str, other: str) -> float:
    """From 1, the same colour, to 21, black on white."""
    darker, lighter = sorted((luminance(one), luminance(other)))
    return (lighter + 0.05) / (darker + 0.05)


def luminance(colour: str) -> float:
    """Relative luminance of ``#rrggbb``."""
    shares = [channel / 255 for channel in _channels(colour)]
    red, green, blue = (s / 12.92 if s <= 0.04045 else ((s + 0.055) / 1.055) ** 2.4 for s in shares)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def ink(colour: str) -> str:
    """Black or white, whichever is easier to read on a colour."""
    return max(INKS, key=lambda one: contrast(one, colour))


def _channels(colour: str) -> tuple[int, int, int]:
    return int(colour[1:3], 16), int(colour[3:5], 16), int(colour[5:7], 16)
