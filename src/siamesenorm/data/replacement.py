"""Replacement: renames that put new things where old ones were, all of them or none.

with Replacement() as swap:
    swap.set_aside(folder / "index.json")                       # hidden beside its place
    swap.move(new / "index.json", folder / "index.json")
# here the old ones are gone; after an error they are where they were
"""

from __future__ import annotations

import contextlib
import errno
import logging
import os
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
        self._written: list[Path] = []

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
        """Put a new file in a place that is free, or out of which an old one is taken."""
        new = path.with_name(hidden_name(path.name, PARTIAL))
        with open(new, "xb") as file:
            self._written.append(new)
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        self.set_aside(path)
        self.move(new, path)

    def __enter__(self) -> Replacement:
        return self

    def __exit__(self, kind: type[BaseException] | None, *error: object) -> None:
        if kind is None:
            self._finish()
        else:
            self._undo()

    def _undo(self) -> None:
        for source, target in reversed(self._moved):
            if os.path.lexists(target) and not os.path.lexists(source):
                try:
                    os.rename(target, source)
                except OSError as error:
                    log.warning("%s could not be put back and lies in %s: %s", source, target, error.strerror)
        for new in self._written:
            with contextlib.suppress(OSError):
                remove_file(new)

    def _finish(self) -> None:
        """The new ones are in place; an old one that cannot be removed now is no failure."""
        for aside, made in self._aside:
            try:
                remove_file(aside) if made is None else remove_tree(aside, made)
            except (OSError, NotOurs) as error:
                log.warning("%s was replaced and could not be removed: %s", aside, error)


def replace_file(new: Path, place: Path) -> None:
    """Put a file where another one may be, in one step; a folder, link or device in its place stays."""
    check_removable(place)
    os.replace(new, place)


def rename_free(source: Path, target: Path) -> None:
    """Rename to a name that must be free."""
    if os.path.lexists(target):
        raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), str(target))
    os.rename(source, target)
