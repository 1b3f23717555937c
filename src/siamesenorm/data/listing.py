"""Listing folders: one that cannot be looked into is an error, where `Path.glob` and `os.walk` pass it over."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


def names_in(folder: Path) -> list[str]:
    """The names in a folder, sorted; none where no folder is."""
    try:
        return sorted(os.listdir(folder))
    except FileNotFoundError:
        return []


def walk(root: Path | str) -> Iterator[tuple[str, list[str], list[str]]]:
    """`os.walk` that raises."""

    def refuse(error: OSError) -> None:
        raise error

    return os.walk(root, onerror=refuse)


def files_below(root: Path) -> list[Path]:
    """Every file in a folder and in its folders, sorted."""
    return sorted(Path(folder) / name for folder, _, names in walk(root) for name in names)
