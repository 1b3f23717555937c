r"""Removal: the one place where files and folders vanish, and only those that this program made.

remove_file(folder / "index.json")
remove_tree(folder / ".progress", re.compile(r"\d{5}\.json"))      # all of it, or nothing
with scratch_folder(target.parent, target.name) as folder: ...     # gone at the end, unless it was moved away

What was made is known by its name: a folder goes only if every file and folder in it has a name that the program
gives there. Links, devices and the folders users work in never go. Nobody else calls `rmtree`, `unlink`, `rmdir`,
`rename` and their kin, but for `siamesenorm.data.replacement`.
"""

from __future__ import annotations

import contextlib
import os
import re
import secrets
import stat
from collections.abc import Iterator
from pathlib import Path

from siamesenorm.errors import DataError

PARTIAL, REPLACED = ".partial", ".replaced"
"""How names end of what is being written, and of what was replaced and is about to go."""
LONGEST = 40
"""Signs of a name that go into a hidden name made from it, so that this is never too long for the system."""
NOTHING = re.compile(r"(?!)")
"""What the program makes in a folder that must be empty to go."""

Made = re.Pattern[str]
"""Fits the path, relative to a folder and with slashes, of everything that the program makes in it."""


class NotOurs(DataError, OSError):
    """Something would have been removed or replaced that this program did not make; it stays.

    A failing file operation too, so that whoever goes on without the file goes on here.
    """


def hidden_name(name: str, ending: str) -> str:
    """A name that nobody else has, beside the one it is made from."""
    return f".{name[:LONGEST]}.{secrets.token_hex(4)}{ending}"


def hidden_names(names: str) -> str:
    """The expression that fits every hidden name made from those that `names` fits."""
    return rf"\.(?:{names})\.[0-9a-f]{{8}}(?:{re.escape(PARTIAL)}|{re.escape(REPLACED)})"


def check_removable(path: Path, made: Made | None = None) -> list[Path]:
    """Everything that goes with a file, or with a folder of what `made` fits, innermost first; raises `NotOurs`.

    What is not there is nothing to remove.
    """
    _check_place(path)
    try:
        mode = os.lstat(path).st_mode
    except FileNotFoundError:
        return []
    if made is None or not stat.S_ISDIR(mode):
        if not stat.S_ISREG(mode):
            kind = "a folder" if stat.S_ISDIR(mode) else "a link" if stat.S_ISLNK(mode) else "no plain file"
            raise NotOurs(f"{str(path)!r} is {kind}, which this program did not make; move it away")
        return [path]
    found = list(_entries(path))
    for entry, plain in found:
        if not plain or not made.fullmatch(entry.relative_to(path).as_posix()):
            raise NotOurs(f"{str(entry)!r} was not made by this program; move it away")
    return [*(entry for entry, _ in found), path]


def remove_file(path: Path) -> None:
    """Remove a file whose name is the program's own; nothing if it is not there."""
    _remove(check_removable(path))


def remove_tree(root: Path, made: Made) -> None:
    """Remove a folder if `made` fits everything in it, else raise `NotOurs` and remove nothing."""
    _remove(check_removable(root, made))


def remove_entries(folder: Path, made: Made) -> None:
    """Remove the files in a folder that `made` fits; others, and folders, stay."""
    for name in sorted(os.listdir(folder)) if folder.is_dir() else ():
        if made.fullmatch(name) and stat.S_ISREG(os.lstat(folder / name).st_mode):
            remove_file(folder / name)


@contextlib.contextmanager
def scratch_folder(parent: Path, name: str, mode: int = 0o777) -> Iterator[Path]:
    """A new folder, hidden beside `name`, that is removed at the end with all that was put into it."""
    folder = parent / hidden_name(name, PARTIAL)
    try:
        os.mkdir(folder, mode)
    except OSError as error:
        error.filename = str(parent / name)  # what was asked for
        raise
    made = os.lstat(folder)
    try:
        yield folder
    finally:
        with contextlib.suppress(OSError):  # moved away, or the disk is failing: then there is an error already
            if os.path.samestat(os.lstat(folder), made):
                _remove([*(entry for entry, _ in _entries(folder)), folder])


def _remove(entries: list[Path]) -> None:
    """Remove what was listed and nothing that has come since: a folder that is not empty by then stays."""
    for entry in entries:
        with contextlib.suppress(FileNotFoundError):  # another process was faster
            if stat.S_ISDIR(os.lstat(entry).st_mode):
                os.rmdir(entry)
            else:
                os.unlink(entry)


def _entries(folder: Path) -> Iterator[tuple[Path, bool]]:
    """All that lies in a folder, innermost first, and whether it is a plain file or folder; links are not followed."""
    with os.scandir(folder) as found:
        entries = sorted(found, key=lambda entry: entry.name)
    for entry in entries:
        is_folder = entry.is_dir(follow_symlinks=False)
        if is_folder:
            yield from _entries(Path(entry.path))
        yield Path(entry.path), is_folder or entry.is_file(follow_symlinks=False)


def _check_place(path: Path) -> None:
    """Refuse what no mistake may ever remove: no name at all, and the folders that users work or live in."""
    if path.name in ("", ".."):
        raise NotOurs(f"{str(path)!r} is no name of a file or folder to remove")
    place = os.path.join(os.path.realpath(path.parent), path.name)
    for which, lived_in in _lived_in():
        if lived_in == place or lived_in.startswith(place + os.sep):
            raise NotOurs(f"{str(path)!r} is or holds the {which} folder {lived_in!r}, which stays")


def _lived_in() -> Iterator[tuple[str, str]]:
    with contextlib.suppress(FileNotFoundError):  # it may be gone itself
        yield "current", os.path.realpath(os.getcwd())
    yield "home", os.path.realpath(os.path.expanduser("~"))
