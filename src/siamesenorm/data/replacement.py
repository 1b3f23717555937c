"""Replacement: renames that put new things where old ones were, all of them or none.

with Replacement() as swap:
    swap.set_aside(folder / "shard.npy")                        # hidden beside its place
    swap.move(new / "shard.npy", folder / "shard.npy")
    swap.write(folder / "config.yaml", b"...")                  # at no moment is there none
# here the old ones are gone; after an error they are where they were
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
from collections.abc import Iterator
from pathlib import Path

from siamesenorm.data.removal import (
    PARTIAL,
    REPLACED,
    Made,
    NotOurs,
    check_removable,
    hidden_name,
    remove_file,
    remove_tree,
)

log = logging.getLogger("siamesenorm")


class Replacement:
    """Undone if its block ends with an error; else what was set aside is removed."""

    def __init__(self) -> None:
        self._moved: list[tuple[Path, Path]] = []
        self._aside: list[tuple[Path, Made | None]] = []
        self._new: list[Path] = []

    def set_aside(self, path: Path, made: Made | None = None) -> None:
        """Take a file, or a folder in which everything fits `made`, out of its place; nothing if it is not there."""
        if check_removable(path, made):
            aside = path.with_name(hidden_name(path.name, REPLACED))
            self.move(path, aside)
            self._aside.append((aside, made))

    def move(self, source: Path, target: Path) -> None:
        """Rename to a name that is free, on the same file system."""
        if os.path.lexists(target):
            raise NotOurs(f"{str(target)!r} is there already; it is not replaced")
        self._moved.append((source, target))  # before it is done: an interrupt may come between
        os.rename(source, target)

    def write(self, path: Path, content: bytes) -> None:
        """Put a small file in a place that is free, or over an old one of which a copy is kept meanwhile."""
        new = self._written(path, PARTIAL, content)
        if not check_removable(path):
            self.move(new, path)
            return
        old = self._written(path, REPLACED, path.read_bytes())
        self._moved.append((path, old))  # undone, the copy takes the place of the new one
        os.replace(new, path)

    def _written(self, path: Path, ending: str, content: bytes) -> Path:
        place = path.with_name(hidden_name(path.name, ending))
        with open(place, "xb") as file:
            self._new.append(place)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        return place

    def __enter__(self) -> Replacement:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is not None:
            self._undo()
        for aside, made in self._aside if kind is None else ():
            with _reporting(aside, "was replaced and could not be removed"):
                remove_file(aside) if made is None else remove_tree(aside, made)
        for new in self._new:
            with _reporting(new, "could not be removed"):
                remove_file(new)

    def _undo(self) -> None:
        for source, target in reversed(self._moved):
            is_copy = target in self._new
            if os.path.lexists(target) and (is_copy or not os.path.lexists(source)):
                if is_copy:
                    self._new.remove(target)  # the last one there is, should it not come back
                with _reporting(target, f"could not be put back to {source}"):
                    os.replace(target, source)


@contextlib.contextmanager
def _reporting(path: Path, what: str) -> Iterator[None]:
    """What fails at the end is said, and changes nothing any more."""
    try:
        yield
    except OSError as error:
        log.warning("%s %s: %s", path, what, error)


def replace_file(new: Path, place: Path) -> None:
    """Put a file where another one may be, in one step; a folder, link or device in its place stays."""
    check_removable(place)
    os.replace(new, place)


def rename_free(source: Path, target: Path) -> None:
    """Rename to a name that must be free."""
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    os.rename(source, target)
